"""A run and its terminal: the console, the progress bar, and signals that wait for a checkpoint."""

from __future__ import annotations

import contextlib
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

    encoding = property(lambda self: getattr(sys.stdout, "encoding", "utf-8"))

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._try(lambda stream: stream.isatty()) or False

    def write(self, text: str) -> None:
        """Write text, or drop it."""
        self._try(lambda stream: stream.write(text))

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        self._try(lambda stream: stream.flush())

    def _try(self, do: Callable[[Any], Any]) -> Any:
        stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # the bar redirects stdout
        if stream is None:
            return None
        try:
            return do(stream)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            warn(f"standard output is gone ({error}); training continues without it.")


# a path may look like markup
console = Console(file=cast(IO[str], _Output()), highlight=False, markup=False)


LABEL = 8  # characters


def print_labelled(label: str, text: str) -> None:
    """Print a line that begins with what it is about; a terminal may break it."""
    console.print(Text.assemble((f"{label:<{LABEL}}", "bold"), text), soft_wrap=True)


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

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    ours = [number for number, old in before.items() if old != signal.SIG_IGN]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield lambda: bool(seen)
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextlib.contextmanager
def progress_bar(total: int, on: Console | None = None) -> Iterator[tuple[Bar, TaskID]]:
    """Show a progress bar as wide as the terminal, with fewer numbers in a narrow one.

    Args:
      total: the number of steps.
      on: the terminal; None: the one of training.
    """
    on = on or console
    width = on.width
    columns: list[ProgressColumn] = [SpinnerColumn(), BarColumn(bar_width=None)]
    columns += [TimeRemainingColumn()] + [TextColumn("left")] * (width >= 60)
    columns += [TextColumn("{task.fields[status]}")] * (width >= 40)
    columns[1:1] = [TextColumn("{task.fields[what]}")] * (width >= 50)
    columns += [TextColumn("step {task.completed}/{task.total}")] * (width >= 70)
    columns += [TextColumn("{task.fields[rate]}")] * (width >= 90)
    with Bar(
        *columns,
        console=on,
        speed_estimate_period=120,
        transient=True,
        expand=True,
        disable=on.quiet or not on.is_terminal,
    ) as bar:
        yield bar, bar.add_task("", total=total, what="", status="compiling", rate="")
