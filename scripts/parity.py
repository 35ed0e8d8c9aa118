"""Runs the parity suite and writes docs/parity.md: every comparison, and how close it came."""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from jaxgru.command_line import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.hardware import describe_hardware

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
PACKAGES = "jax jaxlib optax torch dm-haiku onnx onnxruntime keras numpy scipy".split()
DTYPES = ("float64", "float32")

INTRODUCTION = """\
# Parity: the same numbers as other implementations

On shared weights, what jaxgru computes is what these implementations compute. `torchref` is the
plain PyTorch of this repository; nobody here wrote the others. Weights, biases (the second ones,
too), inputs and carries are random and not zero.

An absolute difference is the largest between two entries of a quantity. A relative one is divided
by the largest entry of its array (or by a hundredth of the largest of all arrays in the quantity,
where that is more). float64 shows that the formulas are the same, float32 what rounding does to
them. "=": not one bit differs. "size": numbers in the largest array or tree compared.
"""


def main() -> None:
    """Runs the tests with recording on, then writes the page whole."""
    parser = Parser(__doc__)
    parser.add_argument("--slow", action="store_true", help="the epoch of real training, too")
    parser.add_argument("--planted", action="store_true", help="try planted errors, too (minutes)")
    arguments = parser.parse_args()
    records, outcome = run_suite(arguments.slow)
    planted = ""
    if arguments.planted:
        import plant_errors  # beside this script

        outcomes = plant_errors.run_all()
        plant_errors.check(outcomes)
        planted = (
            "\n## Planted errors\n\nEach error was planted in a copy of jaxgru, in the cell and in "
            "the unroll alike, and the tests that should notice it were run there "
            "(`scripts/plant_errors.py`).\n\n" + plant_errors.table(outcomes) + "\n"
        )
    command = " ".join(["python scripts/parity.py", *sys.argv[1:]])
    write_text(PAGE, page(records, outcome, command) + planted)
    print(f"{PAGE.relative_to(ROOT)}: {len(records)} comparisons; {outcome}")


def run_suite(slow: bool) -> tuple[list[dict], str]:
    """What the suite recorded, and pytest's last line.

    Raises:
      UserError: a test failed: a page must not be made from a suite that does not pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", "pytest", "parity_tests", "-q", "--tb=short"]
        command += ["-n", "0", "--durations=10", "-p", "no:cacheprovider"]  # the records in order
        command += ["-m", "slow or not slow"] if slow else []
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"JAXGRU_PARITY_RECORD": str(record)},
            stdout=subprocess.PIPE,
            text=True,
        )
        if run.returncode:
            raise UserError(f"the suite does not pass; no page is written.\n{run.stdout}")
        print(run.stdout)
        records = [json.loads(line) for line in record.read_text().splitlines()]
    return records, re.sub(r" in .*", "", run.stdout.splitlines()[-1].strip("= "))


def page(records: list[dict], outcome: str, command: str) -> str:
    """The page as Markdown, without the planted errors."""
    values = [r for r in records if r["kind"] == "values"]
    draws = [r for r in records if r["kind"] == "distribution"]
    numbers = sum(r["size"] for r in values)
    lines = [
        INTRODUCTION,
        f"Made on {datetime.date.today()} by `{command}` on {describe_hardware()}, "
        f"Python {platform.python_version()}; {versions()}.\n",
        f"**{len(records):,} checks** ({len(values):,} comparisons of {numbers:,} numbers and "
        f"{len(draws):,} tests of distributions); pytest: {outcome}.\n",
    ]
    by_implementation = defaultdict(lambda: defaultdict(list))
    for r in values:
        by_implementation[r["implementation"]][r["quantity"]].append(r)
    lines += ["## In short\n", "| implementation | checks | largest relative difference, "
              "float64 | float32 |", "|---|---|---|---|"]  # fmt: skip
    for implementation, quantities in by_implementation.items():
        every = [r for rs in quantities.values() for r in rs]
        worst = [largest(every, dtype, "relative") for dtype in DTYPES]
        lines.append(f"| {implementation} | {len(every):,} | {worst[0]} | {worst[1]} |")
    for implementation, quantities in by_implementation.items():
        lines += [
            f"\n## {implementation}\n",
            "| quantity | checks | size | float64: absolute | relative | allowed "
            "| float32: absolute | relative | allowed |",
            "|" + "---|" * 9,
        ]
        for quantity, rs in quantities.items():
            cells = [quantity, f"{len(rs)}", f"{max(r['size'] for r in rs):,}"]
            if rs[0]["dtype"].startswith("int"):
                cells += ["="] * 6
            else:
                for dtype in DTYPES:
                    cells += [largest(rs, dtype, k) for k in ("absolute", "relative", "tolerance")]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "\n## Random draws against their distributions\n",
        "The samples' seeds are fixed. For right code a p-value is uniform on [0, 1]; a test fails "
        "below 0.001. Sampled texts: chi-squared against the probabilities that torchref computes. "
        "Initialisation: two-sample Kolmogorov–Smirnov against PyTorch's own draws.\n",
        "| quantity | sample | p |",
        "|---|---|---|",
    ]
    lines += [f"| {r['quantity']} | {r['size']:,} | {r['p_value']:.3f} |" for r in draws]
    return "\n".join(lines) + "\n"


def largest(records: list[dict], dtype: str, key: str) -> str:
    """The largest of these records' figures in a dtype, or a dash where it was not compared."""
    figures = [r[key] for r in records if r["dtype"] == dtype]
    if not figures:
        return "–"
    return f"{max(figures):.1e}" if max(figures) else "="


def versions() -> str:
    """Name and version of every implementation that is installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


if __name__ == "__main__":
    run_script(main)
