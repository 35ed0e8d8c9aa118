"""Train every model of the study; skip what is done, resume what was interrupted."""

from __future__ import annotations

import startup  # noqa: F401

import signal
import subprocess
import sys
from pathlib import Path

from jaxgru.cli.options import Parser, run_script, typed
from pages.records import is_finished
from study.jobs import SEEDS, Job, all_jobs, find_job

TRAIN = Path(__file__).with_name("train.py")


def main() -> None:
    """Read the arguments, and run train.py for one job after another."""
    parser = Parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print which runs are done, and stop")
    parser.add_argument("--runs", type=Path, default="runs",
                        help="the folder of the runs (default: %(default)s)")  # fmt: skip
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all runs of the study")
    which.add_argument("--only", nargs="+", metavar="CONFIG", choices=SEEDS, default=[],
                       help=f"only the runs of these: {', '.join(SEEDS)}")  # fmt: skip
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs = [job for job in all_jobs() if arguments.all or job.name in arguments.only]
    failed = []
    for i, job in enumerate(jobs, 1):
        run = find_job(arguments.runs, job)
        done = run is not None and is_finished(run)
        state = "to do" if run is None else f"{'done' if done else 'begun'} in {run}"
        print(f"{i} of {len(jobs)}: {job}: {state}", flush=True)
        if not (done or arguments.list or train(job, run, arguments.runs)):
            failed.append(str(job))
    if failed:
        sys.exit(f"Failed: {'; '.join(failed)}")


def train(job: Job, run: Path | None, runs: Path) -> bool:
    """Train a job, or resume its run, in a process of its own; return whether it succeeded."""
    options = [part for name, value in job.overrides for part in (f"--{name}", typed(value))]
    new = ["--config", job.name, "--runs", str(runs), *options]
    command = new if run is None else ["--resume", str(run)]
    process = subprocess.Popen([sys.executable, str(TRAIN), *command])
    try:
        return process.wait() == 0
    except BaseException as stop:  # train.py then saves; Ctrl-C reaches it without our help
        if not isinstance(stop, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise


if __name__ == "__main__":
    run_script(main)
