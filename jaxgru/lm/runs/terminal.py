"""A run and its terminal: the console, the progress bar, and signals that wait for a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

from jaxgru.errors import needs
from jaxgru.printing import printable

with needs("train"):
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

# A path may look like markup, and is not broken, so that it can be copied
console = Console(highlight=False, markup=False, soft_wrap=True)
LABEL = 8  # characters


def print_labelled(label: str, text: str) -> None:
    """Print a line that begins with what it is about; a terminal may break it."""
    console.print(Text.assemble((f"{label:<{LABEL}}", "bold"), text))


def first_lines(text: str, count: int = 2) -> list[str]:
    """Return the first lines of a text that are not empty, as wide as `print_labelled` leaves."""
    lines = Text(text).wrap(console, console.width - LABEL)
    return [printable(line.plain.rstrip()) for line in lines if line.plain.strip()][:count]


@contextlib.contextmanager
def deferred_signals() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT, SIGTERM or SIGHUP has come.

    An exception raised while XLA compiles would crash the process, so none is raised. A second
    signal ends it as SIGKILL would, which loses no checkpoint. Signals that are ignored stay
    ignored, as SIGHUP under nohup. Python handles signals in its main thread only.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            console.show_cursor(True)  # hidden by the bar
            os._exit(130)
        received.append(number)
        if console.is_terminal:
            console.print("stopping as soon as the run can be saved; a second Ctrl-C ends it now")

    handlers = _handlers_to_replace()
    for number in handlers:
        signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _handlers_to_replace() -> dict[signal.Signals, Any]:
    """Return the handlers of the signals that can be deferred here, by their numbers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    handlers = {number: signal.getsignal(number) for number in numbers}
    return {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}


@contextlib.contextmanager
def progress_bar(total: int, on: Console = console) -> Generator[tuple[Bar, TaskID]]:
    """Show a progress bar of this many steps, as wide as the terminal."""
    with Bar(
        SpinnerColumn(),
        TextColumn("{task.fields[what]}"),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[status]}"),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[rate]}"),
        console=on,
        speed_estimate_period=120,
        transient=True,
        expand=True,
        redirect_stdout=False,  # which is how the console writes
        disable=on.quiet or not on.is_terminal,
    ) as bar:
        yield bar, bar.add_task("", total=total, what="", status="compiling", rate="")
