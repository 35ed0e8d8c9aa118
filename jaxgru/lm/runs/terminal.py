"""A run and its terminal: the console, the progress bar, and signals that wait for a checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from jaxgru.errors import needs, printable, warn

with needs("train"):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text


class _Output:
    """Standard output until a write fails, then nothing, after one warning.

    A closed terminal or a full disk behind `>` must not end a training run.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout or io.StringIO(), name)  # None if it was closed from the start

    def write(self, text: str) -> None:
        """Write text, or drop it."""
        stream = sys.stdout or io.StringIO()
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            warn(f"standard output is gone ({error}); training continues without it.")


# a path may look like markup, and is not broken, so that it can be copied
console = Console(file=cast(IO[str], _Output()), highlight=False, markup=False, soft_wrap=True)


LABEL = 8  # characters


def print_labelled(label: str, text: str) -> None:
    """Print a line that begins with what it is about; a terminal may break it."""
    console.print(Text.assemble((f"{label:<{LABEL}}", "bold"), text))


def first_lines(text: str, count: int = 2) -> list[str]:
    """Return the first lines of a text that are not empty, as wide as `print_labelled` leaves."""
    lines = Text(text).wrap(console, console.width - LABEL)
    return [printable(line.plain.rstrip()) for line in lines if line.plain.strip()][:count]


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Let the first SIGINT, SIGTERM or SIGHUP only set a flag; a second one ends the process.

    An exception raised while XLA compiles would crash the process, so none is raised. A second
    signal ends it as SIGKILL would, which loses no checkpoint. Signals that are ignored stay
    ignored, as SIGHUP under nohup. Python handles signals in its main thread only; in another
    thread, this does nothing.

    Yields a function that returns whether a signal has come.
    """
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            console.show_cursor(True)  # hidden by the bar
            os._exit(130)
        seen.append(number)
        if console.is_terminal:
            console.print("stopping as soon as the run can be saved; a second Ctrl-C ends it now")

    ours: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        ours = {n: old for n in numbers if (old := signal.getsignal(n)) != signal.SIG_IGN}
    for number in ours:
        signal.signal(number, handler)
    try:
        yield lambda: bool(seen)
    finally:
        for number, before in ours.items():
            signal.signal(number, before)


@contextlib.contextmanager
def progress_bar(total: int, on: Console | None = None) -> Iterator[tuple[Bar, TaskID]]:
    """Show a progress bar as wide as the terminal, with fewer numbers in a narrow one.

    Args:
      total: the number of steps.
      on: the terminal; None: the one of training.
    """
    on = on or console
    columns: list[tuple[int, ProgressColumn]] = [  # with the width that each needs
        (0, SpinnerColumn()),
        (50, TextColumn("{task.fields[what]}")),
        (0, BarColumn(bar_width=None)),
        (0, TimeRemainingColumn()),
        (60, TextColumn("left")),
        (40, TextColumn("{task.fields[status]}")),
        (70, TextColumn("step {task.completed}/{task.total}")),
        (90, TextColumn("{task.fields[rate]}")),
    ]
    with Bar(
        *(column for least, column in columns if on.width >= least),
        console=on,
        speed_estimate_period=120,
        transient=True,
        expand=True,
        redirect_stdout=False,  # which is how the console writes
        disable=on.quiet or not on.is_terminal,
    ) as bar:
        yield bar, bar.add_task("", total=total, what="", status="compiling", rate="")
