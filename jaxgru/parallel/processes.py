"""One run on several processes: how they connect, and what they must agree on.

Every process runs the same program on the same numbers, so nearly all communication is collectives
inside a step. This module handles the rest: a signal that one process received, a clock that
differs, a folder that process 0 made. Nothing here schedules or starts processes: a launcher does.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxgru.errors import UserError

JOIN_SECONDS = 120  # how long a process waits for the others to connect
DAY = 24 * 60 * 60
HEARTBEAT_SECONDS = 45  # a process that is silent for this long counts as dead
BLOCK_BYTES = 2**12  # a message is padded to whole blocks: a program is compiled per size
BROKEN_COLLECTIVE = r"(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): "

A = ParamSpec("A")
T = TypeVar("T")


def join(
    coordinator: str | None = None,
    processes: str | int | None = None,
    process: str | int | None = None,
    seconds: int = JOIN_SECONDS,
) -> None:
    """Connect this process to the others of its run. Call this before JAX computes anything.

    It prints on stderr for which processes it waits, and until when. It is meant for scripts: if
    the others do not connect in time, it prints a message and ends the process with exit code 2.

    Arguments that are None are read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. If these are not set, JAX detects SLURM, Kubernetes, Open MPI and Cloud TPU.

    Args:
      coordinator: HOST:PORT of process 0, which listens there.
      processes: the number of processes.
      process: the number of this process, counted from 0.
      seconds: how long to wait for the others, from 1 to 86,400.

    Raises:
      UserError: an argument is missing or wrong, process 0 cannot listen, or JAX cannot connect.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("the number of processes", processes, "JAX_NUM_PROCESSES")
    process = _number("the process's number", process, "JAX_PROCESS_ID")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"the coordinator is {coordinator!r}; it must be HOST:PORT.")
    if processes is not None and process is not None and not process < processes:
        raise UserError(
            f"this is process {process} of {processes}, but they are counted from 0 to "
            f"{processes - 1}."
        )
    if coordinator and process == 0:
        _check_free(coordinator)
    if not 1 <= seconds <= DAY:
        raise UserError(f"the timeout is {seconds} seconds; it must be at least 1, at most {DAY}.")
    try:
        with _waiting(*_expected(coordinator, processes, process), seconds):
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                initialization_timeout=seconds + 60,  # JAX aborts then; we end before
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the processes of this run cannot connect ({reason}); give --distributed.coordinator, "
            "--distributed.processes and --distributed.process, or start them with SLURM or "
            "Kubernetes, which JAX detects."
        ) from error


def _check_free(coordinator: str) -> None:
    """Raise UserError where process 0 cannot listen; JAX would crash, without a word."""
    port = int(coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except (OSError, OverflowError) as error:  # it is taken, or above 65,535
        raise UserError(
            f"process 0 cannot listen at port {port} ({getattr(error, 'strerror', None) or error});"
            " give all processes a --distributed.coordinator with a free one."
        ) from error


def _expected(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[str, str]:
    """Describe this process and the processes it waits for, as far as the arguments say."""
    if coordinator is None or processes is None or process is None:
        return "this process", "the others of its run"
    if process:
        others = f"process 0 at {coordinator}" + ", and for the others" * (processes > 2)
    else:
        others = "process 1" if processes == 2 else f"processes 1 to {processes - 1}"
        others += f" to connect to {coordinator}"
    return f"process {process} of {processes}", others


@contextmanager
def _waiting(this: str, others: str, seconds: int) -> Iterator[None]:
    """While JAX connects, let Ctrl-C and the timeout end the process at once, with a message.

    JAX waits in C++, where Python's signal handlers are not called, and then aborts.
    """

    def give_up() -> None:
        print(
            f"{this} has waited {seconds} s for {others}; start all of them with the same "
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
    text = json.dumps(value).encode() if is_first() else b""
    blocks = int(broadcast_one_to_all(np.int32(-(-len(text) // BLOCK_BYTES))))
    message = np.frombuffer(text.ljust(blocks * BLOCK_BYTES), np.uint8)
    return json.loads(bytes(broadcast_one_to_all(message)))


def in_any_process(flag: bool) -> bool:
    """Return whether the flag is True in any process."""
    return bool(process_allgather(np.int32(flag)).any()) if is_distributed() else flag


def all_or_raise(do: Callable[A, T], *arguments: A.args, **named: A.kwargs) -> T:
    """Call `do` in all processes and return its result; if one raises a UserError, all do.

    Raises:
      UserError: `do` raised it here, or in another process, which the message names.
    """
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
def end_if_another_dies() -> Iterator[None]:
    """If another process dies inside this context, end this process at once, with a message.

    An ordinary exit of Python would make JAX wait for the dead process and then abort. It is meant
    for scripts, because it ends the process.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises either if a collective fails
        if not is_distributed() or not re.match(BROKEN_COLLECTIVE, str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        print(
            f"process {jax.process_index()}: another process of this run seems to have died "
            f"({reason}). All processes end; resume from the last checkpoint with --resume RUN.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
