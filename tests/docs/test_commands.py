"""The commands of the tutorial "Your own text", with a short text and training of a few steps."""

import re
import shlex
from pathlib import Path

import pytest

from pages.tutorials import DOCS, bash, blocks

SMALL = ("steps-per-epoch=2", "batch-size=4", "sequence-length=16")


@pytest.mark.slow
def test_the_commands_of_the_tutorial(script, tmp_path):
    run_bash, namespace = bash(tmp_path), {}
    make_text, *others = blocks((DOCS / "tutorials" / "your_own_text.md").read_text())
    run_bash(make_text.code)
    text = Path("python.txt")
    text.write_text(text.read_text()[:4000])
    for block in others:
        if block.language == "python":
            exec(block.code, namespace)
            continue
        for line in re.sub(r"\\\n", "", block.code).splitlines():
            command, _, target = line.partition(" > ")
            name, *arguments = shlex.split(command)
            if name != "jaxgru":
                run_bash(line)
                continue
            if "train" in arguments and "--resume" not in arguments:
                arguments += [f"--training.{option}" for option in SMALL]
            done = script(*arguments)
            assert done.code == 0, done.err
            if target:
                Path(target).write_text(done.out)
    assert namespace["tokens"].shape == (1, 80)
