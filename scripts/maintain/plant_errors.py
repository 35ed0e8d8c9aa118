"""Plant known errors in a copy of jaxgru, one at a time, and report which parity tests fail.

`python scripts/parity.py --planted` calls this: a suite that has never failed has shown nothing.
Each error is a change of text in a copy of this repository in a temporary folder; the tests that
should notice it run there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxgru.errors import UserError
from pages import markdown
from pages.markdown import ROOT

COPIED = ("jaxgru", "configs", "torchref", "parity_tests", "pyproject.toml")
TAIL = 60  # lines of pytest's output that are shown where it fails

Tests = tuple[str, ...]
CELL_TESTS: Tests = ("parity_tests/test_cells.py", "parity_tests/test_foreign.py",
                     "-k", "float64")  # fmt: skip
STATE_TESTS: Tests = ("parity_tests/test_state.py",
                      "-k", "carry_goes or splitting or fifty_and_fifty")  # fmt: skip
FIFTY_STEPS: Tests = ("parity_tests/test_training.py", "-k", "fifty_steps and float64")

# Where the forward and the backward pass both have the formula, both are changed, so that an error
# is not noticed merely because the two disagree.
ERRORS: dict[str, tuple[Tests, *tuple[tuple[str, str, str], ...]]] = {
    "z and 1 − z swapped": (
        CELL_TESTS,
        ("cells/gru.py", "return (1 - z) * h + z * n", "return z * h + (1 - z) * n"),
        ("cells/gru.py", "z * (1 - n * n)", "(1 - z) * (1 - n * n)"),
        ("cells/gru.py", "layout.join(n - h,", "layout.join(h - n,"),
        ("cells/gru.py", ", 1 - z, r", ", z, r"),
        ("cells/gru.py", "of_n * r), 1 - z", "of_n * r), z"),
    ),
    "reset gate after the product instead of before": (
        CELL_TESTS,
        ("cells/gru.py", "n = jnp.tanh(x_n + (r * h) @ U_n)", "n = jnp.tanh(x_n + r * (h @ U_n))"),
    ),
    "a bias dropped: the candidate's": (
        CELL_TESTS,
        ("cells/gru.py", "x_n + (r * h) @ U_n)", "x_n - p.b[:, 2 * H :] + (r * h) @ U_n)"),
        ("cells/gru.py", "[b_zr + p.c, b_n]", "[b_zr + p.c, 0 * b_n]"),
    ),
    "a bias dropped: the second one of z and r": (
        CELL_TESTS,
        ("cells/gru.py", "[b_zr + p.c, b_n]", "[b_zr, b_n]"),
        ("cells/gru.py", "plus(x_zr + h @ U_zr, p.c)", "x_zr + h @ U_zr"),
    ),
    "the carry of layer 2 not passed on": (
        STATE_TESTS,
        ("layers/implementations.py", "ends.append(c)", "ends.append(carry[i] if i == 1 else c)"),
    ),
    "the state reset while sampling": (
        ("parity_tests/test_sampling.py", "-k", "greedy and float64"),
        ("lm/sampling.py", "state.carry if stateful else start", "start"),
    ),
    "weight decay left off biases": (
        FIFTY_STEPS,
        ("lm/training/optimizer.py", "weight_decay=training.weight_decay,",
         "weight_decay=training.weight_decay,\n"
         "            mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree),"),
    ),
    "the cosine stepped every step": (
        FIFTY_STEPS,
        ("lm/training/optimizer.py", "step // training.steps_per_epoch",
         "step / training.steps_per_epoch"),
    ),
    "a dropout mask reused across a sequence's steps": (
        ("parity_tests/test_models.py", "-k", "masks"),
        ("layers/dropout.py", "threefry2x32_p.bind(*seed, t, ",
         "threefry2x32_p.bind(*seed, 0 * t, "),
    ),
    "dropout masks reused across training steps": (
        FIFTY_STEPS,
        ("lm/training/step.py", "keys = dropout_key,", "keys = state.key,"),
    ),
}  # fmt: skip
"""By name: the tests that should fail, and the changes (file in jaxgru/, text, wrong text)."""


@dataclass(frozen=True)
class Outcome:
    """Which of the chosen tests failed, and how many ran."""

    name: str
    failed: tuple[str, ...]
    num_tests: int


def run_all() -> list[Outcome]:
    """Return every error's outcome, after that of a copy without an error.

    Raises:
      UserError: a text to change no longer exists, tests fail without an error, or pytest breaks
        off.
    """
    every_test = dict.fromkeys(tests for tests, *_ in ERRORS.values())
    with _copied() as copy:
        sound = [_run(copy, tests, may_fail=False) for tests in every_test]
    outcomes = [Outcome("none", (), sum(number for _, number in sound))]
    for name, (tests, *changes) in ERRORS.items():
        with _copied() as copy:
            for file, right, wrong in changes:
                path = copy / "jaxgru" / file
                text = path.read_text(encoding="utf-8")
                if right not in text:
                    raise UserError(f"{name}: jaxgru/{file} no longer has the text {right!r}.")
                path.write_text(text.replace(right, wrong), encoding="utf-8")
            outcomes.append(Outcome(name, *_run(copy, tests)))
    return outcomes


@contextlib.contextmanager
def _copied() -> Iterator[Path]:
    """Yield a temporary folder with a copy of what the tests need."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(folder)


def _run(folder: Path, tests: Tests, may_fail: bool = True) -> tuple[Tests, int]:
    """Run tests with a copy's jaxgru; return the names of those that failed, and how many ran."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import jaxgru; print(jaxgru.__file__)"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not Path(where.strip()).resolve().is_relative_to(folder.resolve()):
        raise UserError("the copy's tests would import another jaxgru than the copy's.")
    output = run_pytest(["--tb=short", "-rf", *tests], folder, environment, may_fail)
    failed = tuple(re.findall(r"^FAILED (\S+)", output, re.MULTILINE))
    number = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed)", output.splitlines()[-1]))
    return failed, number


def run_pytest(
    arguments: list[str], folder: Path, environment: Mapping[str, str], may_fail: bool = False
) -> str:
    """Run pytest in a folder, in a process of its own, and return its output.

    Raises:
      UserError: tests failed, unless they may, or pytest broke off; its last lines are on stderr.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command + arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode and not (may_fail and done.returncode == 1):  # 1: tests failed
        print(*done.stdout.splitlines()[-TAIL:], sep="\n", file=sys.stderr)
        raise UserError(
            f"the tests do not pass (pytest's exit code is {done.returncode}), so nothing is "
            "written; the end of pytest's output is above."
        )
    return done.stdout


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    rows = []
    for outcome in outcomes:
        first = f"`{outcome.failed[0].split('::', 1)[1]}`" if outcome.failed else "–"
        rows.append([outcome.name, f"{len(outcome.failed)} of {outcome.num_tests}", first])
    return markdown.table(["planted error", "failed", "for instance"], rows)


def check(outcomes: list[Outcome]) -> None:
    """Raise UserError unless every planted error makes tests fail."""
    if missed := [outcome.name for outcome in outcomes[1:] if not outcome.failed]:
        raise UserError(f"no test noticed: {', '.join(missed)}.")
