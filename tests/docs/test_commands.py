"""The commands of the tutorial "Your own text", with a short text and training of a few steps."""

import contextlib
import shlex
from pathlib import Path

from pages.tutorials import DOCS, bash, blocks

SMALL = {"steps-per-epoch": 2, "batch-size": 4, "sequence-length": 16}


def test_the_commands_of_the_tutorial(script, tmp_path):
    run_bash, namespace = bash(tmp_path), {}
    for block in blocks((DOCS / "tutorials" / "your_own_text.md").read_text()):
        if block.language == "python":
            exec(block.code, namespace)
            continue
        for line in block.code.splitlines():
            if not line.startswith("jaxgru "):
                run_bash(line)
                continue
            command, _, target = line.partition(" > ")
            _, name, *arguments = shlex.split(command)
            if name == "train" and "--resume" not in arguments:
                arguments += [f"--training.{field}={value}" for field, value in SMALL.items()]
            done = script(name, *arguments)
            assert done.code == 0, done.err
            if target:
                Path(target).write_text(done.out)
        with contextlib.suppress(FileNotFoundError):
            text = Path("python.txt").read_text()
            Path("python.txt").write_text(text[:4000])
    assert len(namespace["tokens"][0]) == 80
