"""Does every kind of harm to training runs, many times, and says what was lost.

    python tests/faults/campaign.py --update docs/reliability.md
    python tests/faults/campaign.py --only "n-th change fails" --first 17 --strikes 1

The second line repeats one try. Prints a Markdown table; exits 1 where a run did not recover.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from fault_kinds import ALL, Outcome
from fault_lab import Lab

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from pages import markdown  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--kills", type=int, default=60, help="SIGKILLs, of two kinds (%(default)s)")
    add("--strikes", type=int, default=30, help="times each other n-th call (%(default)s)")
    add("--each", type=int, default=4, help="times everything else (%(default)s)")
    add("--only", default="", help="kinds whose names this expression finds")
    add("--first", type=int, default=0, help="number of each kind's first try")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=2, help="so many at once (%(default)s)")
    add("--json", type=Path, help="write all outcomes there")
    add("--update", type=Path, metavar="PAGE", help="put the table into this page")
    arguments = parser.parse_args()
    started = time.monotonic()
    wanted = {
        name: arguments.kills // 2 if "SIGKILL" in name
        else arguments.strikes if "n-th" in name
        else arguments.each
        for name in ALL if re.search(arguments.only, name)
    }  # fmt: skip
    tries = [  # round after round, so that what ends early has seen every kind
        (name, number)
        for number in range(max(wanted.values(), default=0))
        for name in wanted if number < wanted[name]
    ]  # fmt: skip
    outcomes: dict[str, list[Outcome]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        lab = Lab(Path(folder))

        def harm(which: tuple[str, int]) -> Outcome:
            name, number = which
            rng = random.Random(f"{arguments.seed} {name} {arguments.first + number}")
            try:
                return ALL[name](lab, rng)
            except Exception:  # what raises is an outcome, too
                return Outcome([traceback.format_exc()])

        for (name, number), outcome in zip(tries, pool.map(harm, tries), strict=True):
            outcomes[name].append(outcome)
            seconds = time.monotonic() - started
            print(f"{seconds:5.0f} s  {name}, {arguments.first + number}: {outcome}", flush=True)
    minutes = (time.monotonic() - started) / 60
    report = f"{table(outcomes)}\n\n{conditions(arguments, minutes)}"
    print(report)
    if arguments.json:
        kept = {name: [vars(outcome) for outcome in done] for name, done in outcomes.items()}
        arguments.json.write_text(json.dumps(kept, indent=1))
    if arguments.update:
        page = arguments.update.read_text()
        arguments.update.write_text(markdown.fill(page, lambda name: report))
    raise SystemExit(any(outcome.problems for done in outcomes.values() for outcome in done))


def conditions(arguments: argparse.Namespace, minutes: float) -> str:
    """Where and when it was measured."""
    counts = f"--kills {arguments.kills} --strikes {arguments.strikes} --each {arguments.each}"
    versions = f"JAX {version('jax')}, Orbax {version('orbax-checkpoint')}"
    machine = f"{os.cpu_count()} CPU cores, {versions}, Python {platform.python_version()}"
    return f"`{counts}`, {datetime.date.today()}: {minutes:.0f} minutes on {machine}."


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Markdown: by kind, how many were tried, recovered, and what they lost."""
    rows = [
        [name, len(done), sum(not outcome.problems for outcome in done),
         f"{statistics.median(outcome.steps_lost for outcome in done):g}",
         max(outcome.steps_lost for outcome in done),
         sum(len(outcome.files_lost) for outcome in done)]
        for name, done in outcomes.items() if done
    ]  # fmt: skip
    head = "fault", "tried", "recovered", "steps lost: median", "most", "files lost"
    lines = [markdown.table(head, rows).rstrip()]
    for name, done in outcomes.items():
        if where := Counter(itertools.chain(*(outcome.where for outcome in done))):
            places = ", ".join(f"{count} {place}" for place, count in where.most_common())
            lines.append(f"\n{name}: {places}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
