"""Train a published model, or any config, or resume a run."""

from __future__ import annotations

from pathlib import Path

from jaxgru.cli.options import Parser, config_overrides, early_value
from jaxgru.cli.summary import print_summary
from jaxgru.config import Config, config_names, load_config
from jaxgru.parallel import processes
from jaxgru.parallel.hardware import keep_freed_memory
from jaxgru.runs import lifecycle
from jaxgru.runs.orbax import silence_orbax

DISTRIBUTED = ("coordinator", "processes", "process")


def main() -> None:
    """Reads the arguments and makes one call."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--config", metavar="NAME", help=f"{', '.join(config_names())}, or a .toml file"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue this run, exactly")
    parser.add_argument("--name", help="of the run's folder (default: the config's and the text's)")
    parser.add_argument("--runs", metavar="FOLDER", default="runs", help="where runs are kept")
    parser.add_argument("--summary", nargs="?", const="layers", choices=["layers", "full"],
                        help="print the sizes and stop: a row for each layer, or (full) for each "
                        "parameter")  # fmt: skip
    many = parser.add_argument_group("many processes (the same command in each)")
    many.add_argument(
        "--distributed", action="store_true", help="join those that SLURM, Kubernetes, … started"
    )
    many.add_argument("--distributed.coordinator", metavar="HOST:PORT", help="of process 0")
    many.add_argument("--distributed.processes", metavar="N", help="how many there are")
    many.add_argument("--distributed.process", metavar="I", help="which this is, from 0")
    many.add_argument("--distributed.timeout", type=int, default=processes.JOIN_SECONDS,
                      metavar="SECONDS",
                      help="that each waits for the others at the start (%(default)s)")  # fmt: skip
    name = early_value("--config")  # before the rest: --help shows this config's values
    parser.add_config_fields(load_config(name) if name else Config())
    arguments = parser.parse_args()
    overrides = config_overrides(arguments)
    if (arguments.config is None) == (arguments.resume is None):
        parser.error(
            "give one of --config NAME (to start a run) and --resume RUN (to continue one)."
        )
    if arguments.resume and (arguments.name or arguments.summary):
        parser.error("--resume continues a run as it is; leave out --name and --summary.")
    if arguments.name:
        overrides["name"] = arguments.name

    keep_freed_memory()
    silence_orbax()  # until the process ends, for its threads outlive an error
    given = [getattr(arguments, f"distributed.{name}") for name in DISTRIBUTED]
    if arguments.distributed or any(given):
        processes.join(*given, getattr(arguments, "distributed.timeout"))
    with processes.ending_together():
        if arguments.resume:
            lifecycle.resume_run(arguments.resume, overrides)
        elif arguments.summary:
            print_summary(load_config(arguments.config, overrides), arguments.summary == "full")
        else:
            lifecycle.start_run(load_config(arguments.config, overrides), Path(arguments.runs))
