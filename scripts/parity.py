"""Run the parity suite and make the tables of docs/parity.md: how close each comparison came."""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from pages.markdown import DOCS, ROOT, table, versions, write_page
from pages.measurements import describe_hardware, grouped

PAGE = DOCS / "parity.md"
PACKAGES = "jax jaxlib optax torch dm-haiku onnx onnxruntime keras numpy scipy".split()
DTYPES = ("float64", "float32")
SUMMARY = ["implementation", "checks", "largest relative difference, float64", "float32"]
QUANTITIES = [
    "quantity",
    "checks",
    "most numbers",
    "float64",
    "allowed",
    "float32",
    "allowed",
]
DRAWS = ["quantity", "tests", "smallest sample", "smallest p"]
KINDS = {
    "transition matrix": "matrix of transitions without a state",
    "derivative": "derivatives by the carry and by the inputs",
    "greedy": "greedy tokens (all equal), and the carry after them",
    "steps of clip": "fifty steps of clipping, AdamW and cosine",
    "first epoch": "an epoch of real training, the loss of every step",
    "distribution": "distribution of the next token",
    "gradient": "gradients",
    "outputs": "outputs",
    "carry": "final carry",
    "logits": "logits",
    "loss": "loss",
    "step": "one step",
    "initialisation": "initial weights, against torchref's draws",
    "init_": "initial weights, against Flax's own draws",
    "sampled texts": "sampled texts, against torchref's probabilities",
    "stateless text": "texts without a state, against a chain without memory",
}
"""What a quantity is called, by the first of these words in its name."""
EPOCH = "parity_tests/test_training.py::test_an_epoch_of_astra_alpha"


def main() -> None:
    """Run the tests, with their records, and write the page."""
    parser = Parser(__doc__)
    parser.add_argument("--slow", action="store_true", help="also one epoch of real training")
    arguments = parser.parse_args()
    records, outcome = run_suite(arguments.slow)
    command = " ".join(["python scripts/parity.py", *sys.argv[1:]])
    write_page(PAGE, tables(records, outcome, command))
    print(f"{PAGE.relative_to(ROOT)}: {len(records)} comparisons; {outcome}")


def run_suite(slow: bool) -> tuple[list[dict], str]:
    """Run the suite; return its records and pytest's summary, such as "268 passed".

    Raises:
      UserError: a test failed: no page must come from a suite that does not pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command += ["parity_tests", "--tb=short", "--durations=10", "-m", "slow or not slow"]
        if not slow:
            command += ["--deselect", EPOCH]
        environment = os.environ | {"JAXGRU_PARITY_RECORD": str(record)}
        process = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        print(process.stdout)
        if process.returncode:
            raise UserError(
                f"the tests do not pass (pytest's exit code is {process.returncode}), so nothing "
                "is written."
            )
        records = [json.loads(line) for line in record.read_text().splitlines()]
    summary = process.stdout.splitlines()[-1].strip("= ")
    return records, re.sub(r" in .*", "", summary)


def tables(records: list[dict], outcome: str, command: str) -> dict[str, str]:
    """Return the page's tables, the number of checks, and under "run" what was run, and where."""
    values = [r for r in records if r["kind"] == "values"]
    draws = [r for r in records if r["kind"] == "distribution"]
    numbers = sum(r["size"] for r in values)
    packages = ", ".join(" ".join(item) for item in versions(PACKAGES).items())
    return {
        "checks": f"**{len(records):,} checks** pass: {len(values):,} comparisons of {numbers:,} "
        f"numbers, and {len(draws):,} tests of distributions.",
        "run": f"""Made on {datetime.date.today()} by `{command}` on {describe_hardware()},
Python {platform.python_version()}; {packages}; pytest: {outcome}.""",
        "summary": table(SUMMARY, summary_rows(values), "lr"),
        "quantities": table(QUANTITIES, quantity_rows(values), "lr"),
        "draws": table(DRAWS, draw_rows(draws)),
    }


def summary_rows(values: list[dict]) -> list[list]:
    """Return a row of SUMMARY per implementation."""
    rows = []
    for implementation, records in grouped(values, lambda r: r["implementation"]).items():
        worst = [largest(records, dtype, "relative") for dtype in DTYPES]
        rows.append([implementation, f"{len(records):,}", *worst])
    return rows


def quantity_rows(values: list[dict]) -> list[list]:
    """Return a row of QUANTITIES per kind of quantity, of all implementations together."""
    rows = []
    for kind, records in grouped(values, kind_of).items():
        size = max(r["size"] for r in records)
        figures = []
        for dtype in DTYPES:
            figures.append(largest(records, dtype, "relative"))
            figures.append(largest(records, dtype, "tolerance"))
        rows.append([kind, len(records), f"{size:,}", *figures])
    return rows


def draw_rows(draws: list[dict]) -> list[list]:
    """Return a row of DRAWS per kind of quantity."""
    rows = []
    for kind, records in grouped(draws, kind_of).items():
        size = min(r["size"] for r in records)
        p_value = min(r["p_value"] for r in records)
        rows.append([kind, len(records), f"{size:,}", f"{p_value:.3f}"])
    return rows


def kind_of(record: dict) -> str:
    """Return what kind of quantity a record is of."""
    quantity = record["quantity"]
    return next((kind for word, kind in KINDS.items() if word in quantity), quantity)


def largest(records: list[dict], dtype: str, key: str) -> str:
    """Return the largest figure of these records in a dtype; a dash if it was not compared."""
    figures = [r[key] for r in records if r["dtype"] == dtype]
    if not figures:
        return "–"
    maximum = max(figures)
    return f"{maximum:.1e}" if maximum else "="


if __name__ == "__main__":
    run_script(main)
