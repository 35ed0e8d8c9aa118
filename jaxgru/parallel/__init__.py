"""Several devices and processes: where arrays are placed, and what the processes agree on.

from jaxgru.parallel import shard_rows, share_cpu

share_cpu(64)  # before JAX computes anything: a CPU's cores become devices
batch = shard_rows(batch)  # a `jit` that takes it computes each device's rows there
"""

from jaxgru.parallel.hardware import keep_freed_memory, share_cpu
from jaxgru.parallel.sharding import shard_rows

__all__ = ["keep_freed_memory", "shard_rows", "share_cpu"]
