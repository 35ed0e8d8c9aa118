"""One run on many processes: how they find one another, and the little that they must agree on.

Every process runs the same program on the same numbers, so the collectives inside a step do nearly
all the talking. What is left: a signal that one of them got, a clock that differs, a folder that
one of them made. Nothing here schedules or starts processes: that is the launcher's business.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxgru.errors import UserError

JOIN_SECONDS = 120  # that the processes of a run may take to come, one after another
DAY = 24 * 60 * 60
HEARTBEAT_SECONDS = 45  # a process that is silent for so long is taken for dead
MESSAGE_BYTES = 2**14  # the longest path, 4096 bytes, takes 12288 in JSON at most
BROKEN_COLLECTIVE = r"(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): "

T = TypeVar("T")


def join(
    coordinator: str | None = None,
    processes: str | int | None = None,
    process: str | int | None = None,
    seconds: int = JOIN_SECONDS,
) -> None:
    """Joins this process to the others of its run; to be called before JAX computes anything.

    Says on stderr for whom it waits, and until when. For scripts: where they do not come, it ends
    the process with a sentence and 2.

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID;
    where those are not set, JAX finds it itself under SLURM, Kubernetes, Open MPI and Cloud TPU.

    Args:
      coordinator: HOST:PORT of process 0, which listens there.
      processes: how many there are.
      process: which one this is, counted from 0.
      seconds: how long to wait for the others.

    Raises:
      UserError: something is missing or wrong.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("the number of processes", processes, "JAX_NUM_PROCESSES")
    process = _number("the process's number", process, "JAX_PROCESS_ID")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"the coordinator is {coordinator!r}; it must be HOST:PORT.")
    if None not in (processes, process) and not process < processes:
        raise UserError(
            f"this is process {process} of {processes}, but they are counted from 0 to "
            f"{processes - 1}."
        )
    if not 1 <= seconds <= DAY:
        raise UserError(f"the timeout is {seconds} seconds; it must be at least 1, at most {DAY}.")
    try:
        with _waiting(*_expected(coordinator, processes, process), seconds):
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                initialization_timeout=seconds + 60,  # then JAX aborts: we come before it
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the processes of this run cannot meet ({reason}); give --distributed.coordinator, "
            "--distributed.processes and --distributed.process, or start them by SLURM or "
            "Kubernetes, which JAX knows."
        ) from error


def _expected(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[str, str]:
    """Which process this is and for whom it waits, in words, as far as one was told."""
    if None in (coordinator, processes, process):
        return "this process", "the others of its run"
    if process:
        others = f"process 0 at {coordinator}" + ", and for the others" * (processes > 2)
    else:
        others = "process 1" if processes == 2 else f"processes 1 to {processes - 1}"
        others += f" to come to {coordinator}"
    return f"process {process} of {processes}", others


@contextmanager
def _waiting(this: str, others: str, seconds: int) -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, and so does the time running out, with a sentence.

    At once, for JAX waits in C++, where Python's handlers are not called, and ends by an abort.
    """

    def give_up() -> None:
        print(
            f"{this} has waited {seconds} s in vain for {others}; start all of them with the same "
            "coordinator and number of processes, or let them wait longer with "
            "--distributed.timeout SECONDS.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        until = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        print(f"{this} waits for {others}, until {until:%H:%M:%S}", file=sys.stderr, flush=True)
        timer.start()
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)


def _number(name: str, given: int | str | None, variable: str) -> int | None:
    text = os.environ.get(variable) if given is None else str(given)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}", text):
        raise UserError(f"{name} is {text!r}; it must be a whole number.")
    return int(text)


def many() -> bool:
    """Whether this run has several processes; asks nothing of JAX's devices where it has one."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which alone writes what is not a checkpoint."""
    return not many() or jax.process_index() == 0


def from_first(value: Any) -> Any:
    """Process 0's value, on all of them; it must be JSON, so that no bit of a float is lost."""
    if not many():
        return value
    text = json.dumps(value if is_first() else None).encode().ljust(MESSAGE_BYTES)
    return json.loads(bytes(broadcast_one_to_all(np.frombuffer(text, np.uint8))))


def anywhere(flag: bool) -> bool:
    """Whether it is so in any of the processes."""
    return bool(process_allgather(np.int32(flag)).any()) if many() else flag


def together(do: Callable[[], T]) -> T:
    """What `do` returns, once all processes have done it; where it fails in one, all stop.

    Raises:
      UserError: here or elsewhere; the one of elsewhere says in which process to look.
    """
    if not many():
        return do()
    result, error = None, None
    try:
        result = do()
    except UserError as caught:
        error = caught
    failed = process_allgather(np.int32(error is not None)).nonzero()[0]
    if error is not None:
        raise error
    if len(failed):
        raise UserError(f"process {failed[0]} cannot go on; its own message says why.")
    return result


@contextmanager
def ending_together() -> Iterator[None]:
    """Inside, where another process has died, this one ends at once, with a sentence.

    At once, for Python's ordinary exit would have JAX wait for the dead one and then abort. For
    scripts: it ends the process.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises either where a collective fails
        if not many() or not re.match(BROKEN_COLLECTIVE, str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        print(
            f"process {jax.process_index()}: another process of this run seems to have died "
            f"({reason}). All end here; go on from the last checkpoint with --resume RUN.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
