"""Several devices and processes: where arrays are placed, and what the processes agree on.

from jaxgru.parallel import shard_rows, share_cpu

share_cpu(64)  # before JAX computes anything: a CPU's cores become devices
batch = shard_rows(batch)  # a `jit` that takes it computes each device's rows there
"""

from jaxgru.parallel.hardware import keep_freed_memory, peak_memory_mb, share_cpu
from jaxgru.parallel.processes import (
    JOIN_SECONDS,
    all_or_raise,
    end_if_another_dies,
    from_first,
    in_any_process,
    is_distributed,
    is_first,
    join,
)
from jaxgru.parallel.sharding import (
    ROWS,
    data_mesh,
    gather,
    one_copy,
    scatter_mean,
    shard,
    shard_rows,
    shardings,
    specs,
)

__all__ = [
    "JOIN_SECONDS",
    "ROWS",
    "all_or_raise",
    "data_mesh",
    "end_if_another_dies",
    "from_first",
    "gather",
    "in_any_process",
    "is_distributed",
    "is_first",
    "join",
    "keep_freed_memory",
    "one_copy",
    "peak_memory_mb",
    "scatter_mean",
    "shard",
    "shard_rows",
    "share_cpu",
    "shardings",
    "specs",
]
