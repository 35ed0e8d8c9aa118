"""Train every model of the study; skip what is done, resume what was interrupted."""

from __future__ import annotations

import startup  # noqa: F401

import signal
import subprocess
import sys
from pathlib import Path

from jaxgru.cli.options import Parser, run_script, typed
from pages.measurements import is_finished
from study.jobs import SEEDS, Job, all_jobs, find_job

TRAIN = Path(__file__).with_name("train.py")


def main() -> None:
    """Read the arguments, and run train.py for one job after another."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print which runs are done, and stop")
    add("--runs", type=Path, default="runs", help="the folder of the runs (default: %(default)s)")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all runs of the study")
    which.add_argument(
        "--only",
        nargs="+",
        metavar="CONFIG",
        choices=SEEDS,
        default=[],
        help=f"only the runs of these: {', '.join(SEEDS)}",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = [job for job in all_jobs() if arguments.all or job.name in arguments.only]
    failures = []
    for i, job in enumerate(jobs, 1):
        run = find_job(arguments.runs, job)
        is_done = run is not None and is_finished(run)
        print(f"{i} of {len(jobs)}: {job}: {state(run, is_done)}", flush=True)
        if is_done or arguments.list:
            continue
        if not train(job, run, arguments.runs):
            failures.append(str(job))
    if failures:
        sys.exit(f"Failed: {'; '.join(failures)}")


def state(run: Path | None, is_done: bool) -> str:
    """Return how far a job is, of which this is the newest run."""
    if run is None:
        return "to do"
    return f"done in {run}" if is_done else f"begun in {run}"


def train(job: Job, run: Path | None, runs: Path) -> bool:
    """Train a job, or resume its run, in a process of its own; return whether it succeeded."""
    if run is None:
        options = ["--config", job.name, "--runs", str(runs)]
        for name, value in job.overrides:
            options += [f"--{name}", typed(value)]
    else:
        options = ["--resume", str(run)]
    process = subprocess.Popen([sys.executable, str(TRAIN), *options])
    try:
        return process.wait() == 0
    except BaseException as stop:  # train.py then saves; Ctrl-C reaches it without our help
        if not isinstance(stop, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise


if __name__ == "__main__":
    run_script(main)
