"""Does every kind of harm to training runs, many times, and says what was lost.

    python tests/faults/campaign.py --kills 100 --each 10 --json faults.json

Half of the kills come at random times, half at a random one of the changes that the process makes
to files. Prints a Markdown table; exits 1 where a run did not recover.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from fault_kinds import ALL, Outcome
from fault_lab import Lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many SIGKILLs (%(default)s)")
    parser.add_argument("--each", type=int, default=10, help="times everything else (%(default)s)")
    parser.add_argument("--only", default="", help="kinds whose names this expression finds")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin nothing new after so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    wanted = dict.fromkeys(ALL, arguments.each)
    wanted |= {name: arguments.kills // 2 for name in ALL if "SIGKILL" in name}
    wanted = {name: count for name, count in wanted.items() if re.search(arguments.only, name)}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        do_all(Lab(Path(folder)), rng, wanted, outcomes, 60 * arguments.minutes)
    print(table(outcomes))
    if arguments.json:
        kept = {name: [vars(outcome) for outcome in done] for name, done in outcomes.items()}
        arguments.json.write_text(json.dumps(kept, indent=1))
    raise SystemExit(any(outcome.problems for done in outcomes.values() for outcome in done))


def do_all(
    lab: Lab,
    rng: random.Random,
    wanted: dict[str, int],
    outcomes: dict[str, list[Outcome]],
    limit: float,
) -> None:
    """Round after round of every kind that is wanted more often, for `limit` seconds."""
    started = time.monotonic()
    while left := [name for name, done in outcomes.items() if len(done) < wanted[name]]:
        for name in left:
            done = outcomes[name]
            seconds = time.monotonic() - started
            if seconds > limit:
                return
            done.append(harm(lab, rng, name))
            print(f"{seconds:5.0f} s  {name} {len(done)}/{wanted[name]}: {done[-1:]}", flush=True)


def harm(lab: Lab, rng: random.Random, name: str) -> Outcome:
    """One try; what raises is an outcome, too."""
    try:
        return ALL[name](lab, rng)
    except Exception:
        return Outcome([traceback.format_exc()])


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Markdown: by kind, how many were tried, recovered, and what they lost."""
    lines = [
        "| fault | tried | recovered | steps lost: median | most | files lost |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, done in outcomes.items():
        if not done:
            continue
        lost = [outcome.steps_lost for outcome in done]
        recovered = sum(not outcome.problems for outcome in done)
        files = sum(len(outcome.files_lost) for outcome in done)
        lines.append(f"| {name} | {len(done)} | {recovered} | {statistics.median(lost):g} "
                     f"| {max(lost)} | {files} |")  # fmt: skip
    for name, done in outcomes.items():
        if where := Counter(itertools.chain(*(outcome.where for outcome in done))):
            struck = "; ".join(f"{place}: {count}" for place, count in where.most_common())
            lines.append(f"\n{name}: struck {struck}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
