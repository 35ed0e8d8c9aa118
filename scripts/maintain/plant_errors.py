"""Plants known errors in a copy of jaxgru, one at a time, and reports which parity tests fail.

A suite that has never failed has shown nothing. Each error is a change of text in a copy of this
repository in a temporary folder; the tests that should notice it run there.
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from pages import markdown

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("jaxgru", "configs", "torchref", "parity_tests", "pyproject.toml")

CELL_TESTS = ("parity_tests/test_cells.py", "parity_tests/test_onnx.py", "-k", "float64")
STATE_TESTS = ("parity_tests/test_state.py", "-k", "carry_goes or splitting or fifty_and_fifty")
FIFTY_STEPS = ("parity_tests/test_training.py", "-k", "fifty_steps and float64")


@dataclass(frozen=True)
class Planted:
    """An error: (file in jaxgru/, text, wrong text) changes, and the tests that should fail."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


# Forward and backward pass are changed alike where both know the formula, so that no disagreement
# between the two gives an error away.
ERRORS = (
    Planted(
        "z and 1 − z swapped",
        (
            ("cells/gru.py", "return (1 - z) * h + z * n", "return z * h + (1 - z) * n"),
            ("cells/gru.py", "da_n = dh * z *", "da_n = dh * (1 - z) *"),
            ("cells/gru.py", "[dh * (n - h),", "[dh * (h - n),"),
            ("cells/gru.py", "dh = dh * (1 - z) +", "dh = dh * z +"),
        ),
        CELL_TESTS,
    ),
    Planted(
        "reset after the product instead of before",
        (
            ("cells/gru.py", "(r * h) @ p.Un", "r * (h @ p.Un)"),
            ("cells/gru.py", "layout.times(Un, r * h)", "r * layout.times(Un, h)"),
            ("cells/gru.py", "d_rh = columns_dot(Un, da_n)", "d_rh = columns_dot(Un, da_n * r)"),
            ("cells/gru.py", "(n - h), d_rh * h]", "(n - h), da_n * columns_dot(Un.T, h)]"),
            ("cells/gru.py", "+ d_rh * r + columns_dot", "+ d_rh + columns_dot"),
            ("cells/gru.py", ").T, (r * h).T)", ").T, (r * da_n).T)"),
            ("cells/gru.py", "outer(rh, da[..., 2 * H :], Un", "outer(h_before, rh, Un"),
        ),
        CELL_TESTS,
    ),
    Planted(
        "a bias dropped: the candidate's",
        (
            ("cells/gru.py", "(r * h) @ p.Un + p.bn)", "(r * h) @ p.Un)"),
            ("cells/gru.py", "plus(p.br, p.cr), p.bn]", "plus(p.br, p.cr), 0 * p.bn]"),
        ),
        CELL_TESTS,
    ),
    Planted(
        "a bias dropped: the second one of z and r",
        (("cells/base.py", "return b if c is None else b + c", "return b"),),
        CELL_TESTS,
    ),
    Planted(
        "the carry of layer 2 not passed on",
        (
            (
                "layers.py",
                "tuple(new_carry)",
                "tuple(carry[i] if i == 1 else c for i, c in enumerate(new_carry))",
            ),
        ),
        STATE_TESTS,
    ),
    Planted(
        "the state thrown away while sampling",
        (("sampling.py", "carry if stateful else start", "start"),),
        ("parity_tests/test_sampling.py", "-k", "greedy and float64"),
    ),
    Planted(
        "weight decay left off biases",
        (
            (
                "training/step.py",
                "weight_decay=training.weight_decay,",
                "weight_decay=training.weight_decay,\n"
                "            mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree),",
            ),
        ),
        FIFTY_STEPS,
    ),
    Planted(
        "the cosine stepped every step",
        (
            (
                "training/step.py",
                "step // training.steps_per_epoch",
                "step / training.steps_per_epoch",
            ),
        ),
        FIFTY_STEPS,
    ),
    Planted(
        "a dropout mask reused across a sequence's steps",
        (
            (
                "model.py",
                "counters = jnp.stack([t, ",
                "counters = jnp.stack([0 * t, ",
            ),
        ),
        ("parity_tests/test_models.py", "-k", "masks"),
    ),
    Planted(
        "dropout masks reused across training steps",
        (("training/step.py", "dropout = Dropout(dropout_key,", "dropout = Dropout(state.key,"),),
        FIFTY_STEPS,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Which of the chosen tests failed, of how many."""

    name: str
    failed: tuple[str, ...]
    num_tests: int


def run_all() -> list[Outcome]:
    """Every error's outcome; the first one is of no error at all, where nothing must fail.

    Raises:
      UserError: a text to change is not there any more, or a test run breaks off.
    """
    every_test = tuple(dict.fromkeys(error.tests for error in ERRORS))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_into(copy)
        sound = [_run(copy, tests) for tests in every_test]
    failed = tuple(name for names, _ in sound for name in names)
    outcomes = [Outcome("none", failed, sum(number for _, number in sound))]
    for error in ERRORS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            _copy_into(copy)
            for file, right, wrong in error.changes:
                path = copy / "jaxgru" / file
                text = path.read_text(encoding="utf-8")
                if right not in text:
                    raise UserError(f"{error.name}: jaxgru/{file} has no text {right!r} any more.")
                path.write_text(text.replace(right, wrong), encoding="utf-8")
            outcomes.append(Outcome(error.name, *_run(copy, error.tests)))
    return outcomes


def _copy_into(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def _run(folder: Path, tests: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The names of the tests that failed, and how many ran, with the copy's jaxgru."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import jaxgru; print(jaxgru.__file__)"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not Path(where.strip()).resolve().is_relative_to(folder.resolve()):
        raise UserError("the copy's tests would import another jaxgru than the copy's.")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=no", "-rf"]
    command += ["-p", "no:cacheprovider"]
    run = subprocess.run(
        command + list(tests), cwd=folder, env=environment, capture_output=True, text=True
    )
    if run.returncode not in (0, 1):  # 1: tests failed; anything else: they could not run
        raise UserError(f"pytest broke off with {run.returncode}: {run.stdout[-500:]}")
    failed = tuple(re.findall(r"^FAILED (\S+)", run.stdout, re.MULTILINE))
    number = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed)", run.stdout))
    return failed, number


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    rows = []
    for outcome in outcomes:
        first = f"`{outcome.failed[0].split('::', 1)[1]}`" if outcome.failed else "–"
        rows.append([outcome.name, f"{len(outcome.failed)} of {outcome.num_tests}", first])
    return markdown.table(["planted error", "failed", "for instance"], rows)


def main() -> None:
    """Prints the table; a planted error that no test notices is an error here."""
    Parser(__doc__).parse_args()
    outcomes = run_all()
    print(table(outcomes), end="")
    check(outcomes)


def check(outcomes: list[Outcome]) -> None:
    """Raises UserError unless every planted error, and nothing else, makes tests fail."""
    sound, *planted = outcomes
    if sound.failed:
        raise UserError(f"without any planted error these fail: {', '.join(sound.failed)}.")
    if missed := [outcome.name for outcome in planted if not outcome.failed]:
        raise UserError(f"no test noticed: {', '.join(missed)}.")


if __name__ == "__main__":
    run_script(main)
