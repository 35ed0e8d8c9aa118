"""Fuzzes every loader: python tests/fuzz/campaign.py --cases 10000 [--kinds pth …] [--out FOLDER].

A case is given again by its kind, seed and number: --kinds pth --seed 1 --first 4711 --cases 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzzing import KINDS, Tally, run_kind


def main() -> int:
    """Runs the kinds one after another; 1 where there were findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind (%(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, choices=(*KINDS, "large"), metavar="KIND"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, help="where findings go (a new folder in /tmp)")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="jaxgru_fuzz_"))
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began, rows, findings = time.monotonic(), [], []
    for kind in arguments.kinds:
        start = time.monotonic()

        def progress(tally: Tally, kind: str = kind, start: float = start) -> None:
            if tally.cases % 50 == 0 or tally.cases == arguments.cases:
                print(f"\r{kind}: {tally.cases}/{arguments.cases} cases, {len(tally.findings)} "
                      f"findings, {time.monotonic() - start:.0f} s ", end="", file=sys.stderr,
                      flush=True)  # fmt: skip

        stop = arguments.first + arguments.cases
        tally = run_kind(kind, arguments.seed, arguments.first, stop, out, progress)
        print(file=sys.stderr)
        findings += tally.findings
        rows.append((kind, tally.cases, tally.used, tally.refused, tally.known,
                     len(tally.findings),
                     f"{tally.slowest:.1f}", tally.largest_peak >> 20,
                     f"{time.monotonic() - start:.0f}"))  # fmt: skip
        lines = [json.dumps(finding) + "\n" for finding in findings]
        (out / "findings.jsonl").write_text("".join(lines))
    head = (
        "kind",
        "cases",
        "used",
        "refused",
        "known",
        "findings",
        "slowest, s",
        "peak, MiB",
        "took, s",
    )
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
    for (kind, said), count in Counter((f["kind"], f["said"][:150]) for f in findings).items():
        print(f"{kind}: {count} × {said}")
    print(f"{len(findings)} findings, {time.monotonic() - began:.0f} s; {out}")
    return bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
