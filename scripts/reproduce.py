"""Train and measure every model of the study; skip what is done, resume what was interrupted."""

from __future__ import annotations

import startup  # noqa: F401

import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from jaxgru.cli.options import Parser, run_script, typed
from jaxgru.lm.runs.folders import is_finished
from study.jobs import NANOGPT, SEEDS, Job, all_jobs, find_job, is_measured

SCRIPTS = Path(__file__).parent
MORE_TO_DO, FAILED = 3, 1  # exit codes
console = Console(highlight=False)


class TimeIsUp(Exception):
    """The given minutes have passed, and the run in progress is saved."""


def main() -> None:
    """Read the arguments, and run train.py and evaluate.py for one job after another."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--all", action="store_true", help="all runs of the study")
    add("--only", nargs="+", metavar="CONFIG", default=[], help="only the runs of these configs")
    add("--list", action="store_true", help="print which runs are done, of all or of --only")
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="save, stop and exit 3 after so long; run again to go on",
    )
    add("--runs", default="runs", help="the folder of the runs (default: %(default)s)")
    arguments = parser.parse_args()
    for name in arguments.only:
        if name not in SEEDS:
            parser.error(f"the study has no {name!r}; it has {', '.join(SEEDS)}.")
    arguments.all |= arguments.list and not arguments.only
    if arguments.all == bool(arguments.only):
        parser.error("give one of --all and --only CONFIG ….")
    if arguments.minutes is not None and not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes:g}; it must be above 0.")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = Path(arguments.runs)
    deadline = time.monotonic() + 60 * (arguments.minutes or float("inf"))
    jobs = [job for job in all_jobs() if arguments.all or job.name in arguments.only]
    failed = []
    for i, job in enumerate(jobs):
        console.print(f"[bold]{i + 1} of {len(jobs)}: {job}: {state(runs, job)}[/bold]")
        if arguments.list:
            continue
        try:
            if not train_and_measure(job, runs, deadline):
                failed.append(job)
        except TimeIsUp:
            done = sum(state(runs, job) == "done" for job in jobs)
            console.print(f"Time is up: {done} of {len(jobs)} done. The same command continues.")
            raise SystemExit(MORE_TO_DO) from None
    if failed:
        console.print("Failed: " + "; ".join(map(str, failed)))
        raise SystemExit(FAILED)


def state(runs: Path, job: Job) -> str:
    """Return the state of a job in words."""
    run = find_job(runs, job)
    if run is None:
        return "to do"
    if not is_finished(run):
        return f"begun in {run}"
    return "done" if is_measured(run) else f"trained in {run}, to be measured"


def train_and_measure(job: Job, runs: Path, deadline: float) -> bool:
    """Train and measure a job as far as it is not done; return False if a script failed."""
    run = find_job(runs, job)
    if run is None:
        options = [part for name, value in job.overrides for part in (f"--{name}", typed(value))]
        command = ["train", "--config", job.name, "--runs", str(runs), *options]
    else:
        command = ["train", "--resume", str(run)]
    if (run is None or not is_finished(run)) and not run_script_until(command, deadline):
        return False
    run = find_job(runs, job)
    assert run is not None  # train.py has created it
    more = ["--random-batches"] if job.name in NANOGPT else []
    return is_measured(run) or run_script_until(
        ["evaluate", "--run", str(run), "--save", *more], deadline
    )


def run_script_until(command: list[str], deadline: float) -> bool:
    """Run a script in a process of its own; return whether it succeeded.

    At the deadline, or if this process gets SIGTERM, the script gets SIGTERM; train.py then saves.
    Ctrl-C reaches the script without our help, and a second signal would stop it at once.

    Raises:
      TimeIsUp: it was stopped, or there was no time left to start it.
    """
    name, *options = command
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeIsUp
    process = subprocess.Popen([sys.executable, str(SCRIPTS / f"{name}.py"), *options])
    try:
        return process.wait(None if left == float("inf") else left) == 0
    except BaseException as stop:
        if not isinstance(stop, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)
        process.wait()
        if isinstance(stop, subprocess.TimeoutExpired):
            raise TimeIsUp from None
        raise


if __name__ == "__main__":
    run_script(main)
