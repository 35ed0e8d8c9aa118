"""One run on several processes: how they connect, and what they must agree on.

Every process runs the same program on the same numbers, so nearly all communication is collectives
inside a step. The rest is here: a signal that one process received, a clock that differs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxgru.errors import UserError
from jaxgru.printing import warn

JOIN_SECONDS = 120
"""How long a process waits for the others to connect."""
HEARTBEAT_SECONDS = 45  # a process that is silent for this long counts as dead
BLOCK_BYTES = 2**12  # a message is padded to whole blocks: a program is compiled per size
BROKEN_COLLECTIVE = r"(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): "

A = ParamSpec("A")
T = TypeVar("T")


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    seconds: int = JOIN_SECONDS,
) -> None:
    """Connect this process to the others of its run. Call this before JAX computes anything.

    Arguments that are None are read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. If these are not set, JAX detects SLURM, Kubernetes, Open MPI and Cloud TPU.

    Args:
      coordinator: HOST:PORT of process 0, which listens there.
      processes: the number of processes.
      process: the number of this process, counted from 0.
      seconds: how long to wait for the others; then the process ends with exit code 2.

    Raises:
      UserError: an argument is missing or wrong, or JAX cannot connect.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"the coordinator is {coordinator!r}; it must be HOST:PORT.")

    timer = threading.Timer(seconds, _give_up, [seconds])
    timer.start()
    # JAX waits in C++, which is deaf to Python's handler
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            coordinator,
            _or_environment(processes, "JAX_NUM_PROCESSES"),
            _or_environment(process, "JAX_PROCESS_ID"),
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"the processes of this run cannot connect ({reason}); give --distributed.coordinator, "
            "--distributed.processes and --distributed.process, or start them with SLURM or "
            "Kubernetes, which JAX detects."
        ) from error
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)


def _give_up(seconds: int) -> None:
    """End the process with a message, before JAX aborts it with a trace of C++."""
    warn(
        f"the other processes have not connected within {seconds} s; start all of them with "
        "the same coordinator and number of processes, or raise --distributed.timeout."
    )
    os._exit(2)


def _or_environment(number: int | None, variable: str) -> int | None:
    """Return the number or, if it is None, that of the environment, if it has one."""
    if number is not None:
        return number
    text = os.environ.get(variable)
    return None if text is None else int(text)


def is_distributed() -> bool:
    """Return whether this run has several processes; if it has one, this does not start JAX."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Return whether this is process 0, the only one to write files other than checkpoints."""
    return not is_distributed() or jax.process_index() == 0


def from_first(value: Any) -> Any:
    """Return process 0's value in every process. It is sent as JSON, which keeps floats exact."""
    if not is_distributed():
        return value
    text = b""
    if is_first():
        text = json.dumps(value).encode()
    num_blocks = -(-len(text) // BLOCK_BYTES)
    num_blocks = int(broadcast_one_to_all(np.int32(num_blocks)))
    message = np.frombuffer(text.ljust(num_blocks * BLOCK_BYTES), np.uint8)
    return json.loads(bytes(broadcast_one_to_all(message)))


def in_any_process(flag: bool) -> bool:
    """Return whether the flag is True in any process."""
    if not is_distributed():
        return flag
    return bool(process_allgather(np.int32(flag)).any())


def all_or_raise(do: Callable[A, T], *arguments: A.args, **named: A.kwargs) -> T:
    """Call `do` in all processes and return its result; if one raises a UserError, all do."""
    if not is_distributed():
        return do(*arguments, **named)
    try:
        result = do(*arguments, **named)
    except UserError:
        process_allgather(np.int32(True))
        raise
    failed = process_allgather(np.int32(False)).nonzero()[0]
    if len(failed):
        raise UserError(f"process {failed[0]} has failed; its own message says why.")
    return result


@contextmanager
def end_if_another_dies() -> Generator[None]:
    """If another process dies inside this context, end this process at once, with a message."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises either if a collective fails
        if not is_distributed() or not re.match(BROKEN_COLLECTIVE, str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        warn(
            f"process {jax.process_index()}: another process of this run seems to have died "
            f"({reason}). All processes end; resume from the last checkpoint with --resume RUN."
        )
        sys.stdout.flush()
        # Python's exit would let JAX wait for the dead process, then abort
        os._exit(1)
