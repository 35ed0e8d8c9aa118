"""The recording of a terminal: a version-2 .cast, with shorter times, and the GIF that it makes."""

import io
import json
import sys
from pathlib import Path

import pytest

from jaxgru.errors import UserError
from maintain import recording

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
linux = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")


@linux
def test_what_a_command_prints_is_recorded(tmp_path):
    command = "python -c 'import os; print(os.getcwd(), os.get_terminal_size())'"
    events = list(recording.record([command], str(tmp_path)))
    moments = [moment for moment, _ in events]
    assert moments == sorted(moments) and moments[0] >= 0
    size = f"os.terminal_size(columns={recording.COLUMNS}, lines={recording.ROWS})"
    assert "".join(text for _, text in events) == f"$ {command}\r\n{tmp_path} {size}\r\n"


@linux
def test_a_command_that_fails_is_said(tmp_path):
    with pytest.raises(UserError, match=r"exit\(3\)' ended with exit code 3\."):
        list(recording.record(["python -c 'exit(3)'"], str(tmp_path)))


def test_times_are_divided_and_waits_are_cut():
    assert (recording.SPEED, recording.PAUSE) == (10, 0.4)
    events = [(1.0, "a"), (3.0, "b"), (103.0, "c"), (104.0, "d")]
    shown = [0.1, 0.3, 0.7, 0.8]
    assert [moment for moment, _ in recording.shortened(events)] == pytest.approx(shown)


def test_the_gif_shows_the_recording():
    pytest.importorskip("pyte")
    Image = pytest.importorskip("PIL.Image")
    events = [(0.0, "x"), (0.01, "y"), (1.0, "\r\x1b[2K"), (2.5, "\x1b[38;5;196mdone\u280b")]
    image = Image.open(io.BytesIO(recording.draw(events)))
    seen = []
    for i in range(image.n_frames):
        image.seek(i)
        colors = {color for _, color in image.convert("RGB").getcolors(2**20)}
        seen.append((image.info["duration"], len(colors) > 1, (255, 0, 0) in colors))
    # red text, the last; both letters in one frame; an empty line
    assert seen == [(5000, True, True), (1000, True, False), (1500, False, False)]


def test_the_one_in_docs():
    text = (FIGURES / "two_commands.cast").read_text(encoding="utf-8")
    assert json.loads(text.splitlines()[0])["version"] == 2
    events = recording.from_cast(text)
    printed = "".join(part for _, part in events)
    assert all(f"$ {command}\r\n" in printed for command in recording.COMMANDS)
    assert recording.to_cast(events) == text
    assert (FIGURES / "two_commands.gif").stat().st_size < 10**6
