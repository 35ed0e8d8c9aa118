"""Record a terminal: train astra_alpha for two epochs, then write with and without a state.

The commands really run, in a pseudo-terminal; only their typing is simulated. What they print, with
its times, is written as an asciinema recording (`.cast`, version 2) and drawn as a GIF. Waiting is
shortened: every time is divided by SPEED, and no wait is longer than PAUSE. It needs a
system with pseudo-terminals, not Windows. Drawing needs pyte and Pillow: pip install pyte pillow
"""

from __future__ import annotations

import startup  # noqa: F401

import codecs
import io
import itertools
import json
import os
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.files import write_bytes, write_text
from pages.markdown import DOCS, ROOT

COMMANDS = (
    "jaxgru train astra_alpha --training.epochs 2",
    "jaxgru sample astra_beta --compare --num-tokens 160",
)
COLUMNS, ROWS = 96, 26
SPEED = 10  # divides all times
PAUSE = 0.4  # seconds of the longest wait that is shown
TYPING = 0.25  # seconds per character, before times are divided
END = 5.0  # seconds for which the last picture is shown, with which the GIF begins
FRAMES_PER_SECOND = 10
FONT_SIZE = 13
BACKGROUND = "#1b1f24"
COLORS = {
    "default": "#d0d7de", "black": "#6e7781", "red": "#ff8182", "green": "#6fdd8b",
    "brown": "#e3b341", "blue": "#6cb6ff", "magenta": "#d2a8ff", "cyan": "#56d4dd",
    "white": "#d0d7de",
}  # fmt: skip
"""The terminal's own colors, by pyte's names; all others are given as their six digits."""

Event = tuple[float, str]  # the time in seconds, and what was printed


def main() -> None:
    """Read the arguments, run the commands, and write the recording and the GIF."""
    parser = Parser(__doc__)
    parser.add_argument("--draw-only", action="store_true", help="draw the recording there is")
    arguments = parser.parse_args()
    cast = DOCS / "figures" / "two_commands.cast"
    if not arguments.draw_only:
        with tempfile.TemporaryDirectory() as folder:  # its runs/ is empty
            write_text(cast, to_cast(shortened(record(COMMANDS, folder))))
    events = from_cast(cast.read_text(encoding="utf-8"))
    write_bytes(cast.with_suffix(".gif"), draw(events))
    print(f"{cast} and .gif: {events[-1][0]:.0f} s")


def record(commands: Iterable[str], folder: str) -> Iterator[Event]:
    """Run shell commands one after another in a pseudo-terminal, and yield what it shows.

    Raises:
      UserError: a command fails.
    """
    import fcntl
    import pty
    import termios

    began = time.monotonic()
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment |= {"JAXGRU_CORPUS": "", "XDG_CACHE_HOME": folder}  # as on a new machine
    for command in commands:
        for character in f"$ {command}\r\n":
            yield time.monotonic() - began, character
            began -= TYPING
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        name, *options = shlex.split(command)
        words = [sys.executable, *["-m", name] * (name != "python"), *options]
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
                                   env=environment, start_new_session=True)  # fmt: skip
        os.close(theirs)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while text := _read(ours):
            yield time.monotonic() - began, decode(text)
        os.close(ours)
        if process.wait() != 0:
            raise UserError(f"{command} ended with exit code {process.returncode}.")


def _read(terminal: int) -> bytes:
    """Read what a pseudo-terminal shows next; nothing at its end, where Linux raises OSError."""
    try:
        return os.read(terminal, 2**16)
    except OSError:
        return b""


def shortened(events: Iterable[Event]) -> Iterator[Event]:
    """Divide times by SPEED and shorten waits that are longer than PAUSE after that."""
    last = shown = 0.0
    for moment, text in events:
        shown += min((moment - last) / SPEED, PAUSE)
        last = moment
        yield shown, text


def to_cast(events: Iterable[Event]) -> str:
    """Return a recording in asciinema's format, version 2: a header and a line per event."""
    title = f"played {SPEED} times as fast, waits of at most {PAUSE} s"
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    lines = [header, *([round(moment, 3), "o", text] for moment, text in events)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def from_cast(text: str) -> list[Event]:
    """Return the events of such a recording."""
    _, *events = map(json.loads, text.splitlines())
    return [(moment, printed) for moment, _, printed in events]


def draw(events: Iterable[Event]) -> bytes:
    """Return an animated GIF of a recording. Raises UserError if a package is missing."""
    try:
        import pyte
        from PIL import Image
    except ImportError as error:
        raise UserError(f"{error.name} is missing; pip install pyte pillow installs it.") from None
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    paint = _painter()
    frames, moments, colors = [], [], {"default"}
    events = list(events)
    numbers = [int(moment * FRAMES_PER_SECOND) for moment, _ in events]
    for number, following, (_, text) in zip(numbers, [*numbers[1:], -1], events, strict=True):
        stream.feed(text)
        if number == following or not screen.dirty:
            continue  # a later event of the same frame is drawn
        colors |= {cell.fg for row in screen.buffer.values() for cell in row.values()}
        frames.append(paint(screen))
        moments.append(number / FRAMES_PER_SECOND)
        screen.dirty.clear()
    shades = {_mixed(color, share) for color in colors for share in (0, 0.25, 0.5, 0.75, 1)}
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for shade in sorted(shades) for part in shade])
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [round(1000 * (b - a)) for a, b in itertools.pairwise(moments)]
    *before, last = images  # the GIF begins at its end, for readers whose browser plays none
    file = io.BytesIO()
    last.save(file, "GIF", save_all=True, append_images=before, loop=0, optimize=False,
              duration=[round(1000 * END), *durations])  # fmt: skip
    return file.getvalue()


def _mixed(name: str, share: float) -> tuple[int, ...]:
    """Return this share of a color, by pyte's name, and the rest of the background."""
    color = COLORS.get(name.removeprefix("bright"), f"#{name}")
    parts = zip(bytes.fromhex(color[1:]), bytes.fromhex(BACKGROUND[1:]), strict=True)
    return tuple(round(share * part + (1 - share) * other) for part, other in parts)


def _painter() -> Any:
    """Return a function that draws a screen, in the font that comes with matplotlib."""
    from matplotlib.font_manager import FontProperties, findfont
    from PIL import Image, ImageDraw, ImageFont

    def font(family: str, weight: str) -> Any:
        return ImageFont.truetype(findfont(FontProperties(family=family, weight=weight)), FONT_SIZE)

    fonts = [font("DejaVu Sans Mono", weight) for weight in ("normal", "bold")]
    dots = font("DejaVu Sans", "normal")  # Braille patterns, which a spinner is made of
    width, height, margin = round(fonts[0].getlength("M")), round(1.35 * FONT_SIZE), 8

    def paint(screen: Any) -> Any:
        size = COLUMNS * width + 2 * margin, ROWS * height + 2 * margin
        image = Image.new("RGB", size, BACKGROUND)
        pen = ImageDraw.Draw(image)
        for y in range(ROWS):
            for x in range(COLUMNS):
                cell = screen.buffer[y][x]
                if cell.data != " ":
                    known = dots if "\u2800" <= cell.data <= "\u28ff" else fonts[cell.bold]
                    at = margin + x * width, margin + y * height
                    pen.text(at, cell.data, fill=_mixed(cell.fg, 1), font=known)
        return image

    return paint


if __name__ == "__main__":
    run_script(main)
