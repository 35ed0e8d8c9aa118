"""Train a model from a config, train a model further, or resume a run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from jaxgru import parallel
from jaxgru.cli.options import Parser, config_overrides
from jaxgru.cli.summary import as_trained, print_summary
from jaxgru.errors import check_whole
from jaxgru.lm import find_model
from jaxgru.lm.config import Config, config_names, load_config
from jaxgru.lm.formats import NAMES, format_of
from jaxgru.lm.runs import lifecycle
from jaxgru.lm.runs.initial import config_from
from jaxgru.lm.runs.lifecycle import silence_orbax
from jaxgru.parallel import keep_freed_memory


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "train astra_alpha",
            "train astra_alpha --data.corpus my_text.txt --training.epochs 20",
            "train --init astra_beta --data.corpus my_text.txt --training.epochs 5",
            "train --resume runs/astra_alpha",
        ],
        usage="([CONFIG] [--init MODEL] | --resume RUN) [options]",
    )
    _add_run_options(parser)
    parser.add_config_fields(*_shown_config())
    _add_distributed_options(parser)
    return parser


def _add_run_options(parser: Parser) -> None:
    """Add the options that say which run to start or to resume."""
    group = parser.add_argument_group("run")
    config = group.add_mutually_exclusive_group()
    config.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        default=argparse.SUPPRESS,
        help=f"{', '.join(config_names())}, or a .toml file; also as --config",
    )
    config.add_argument("--config", help=argparse.SUPPRESS)
    group.add_argument(
        "--init",
        metavar="MODEL",
        dest="training.init_from",
        help=f"start from the weights of this pretrained model, run folder or {NAMES} file; "
        "without CONFIG, its config applies, too",
    )
    group.add_argument(
        "--resume",
        metavar="RUN",
        help="resume this run; it ends as if it had never stopped",
    )
    group.add_argument(
        "--name", help="name of the run's folder (default: made from config and text)"
    )
    group.add_argument(
        "--runs",
        metavar="FOLDER",
        default="runs",
        help="folder of all runs (default: %(default)s)",
    )
    group.add_argument(
        "--summary",
        nargs="?",
        const="layers",
        choices=["layers", "full"],
        help="print the model's sizes and exit, with a row per layer or (full) per parameter",
    )


def _add_distributed_options(parser: Parser) -> None:
    """Add the options of one among several processes."""
    group = parser.add_argument_group("distributed (the same command in each process)")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="join the processes that SLURM or Kubernetes started",
    )
    group.add_argument(
        "--distributed.coordinator", metavar="HOST:PORT", help="address of process 0"
    )
    group.add_argument("--distributed.processes", type=int, help="number of processes")
    group.add_argument("--distributed.process", type=int, help="number of this process, from 0")
    group.add_argument(
        "--distributed.timeout",
        type=int,
        metavar="SECONDS",
        default=parallel.JOIN_SECONDS,
        help="time to wait for the other processes (default: %(default)s)",
    )


def _shown_config() -> tuple[Config, str]:
    """Return the config whose values --help shows, the first that is named, and what to call it."""
    if {"-h", "--help"} & set(sys.argv):
        words = [word.removeprefix("--config=") for word in sys.argv[1:]]
        for word in words:
            if word in config_names() or word.endswith(".toml"):
                return load_config(word), f"; {word}'s values are the defaults"
    return Config(), ""


def main() -> None:
    """Parse the arguments; train, resume or print a summary."""
    parser = make_parser()
    arguments = parser.parse_args()
    overrides = config_overrides(arguments)
    check(parser, arguments, overrides)
    if arguments.name is not None:
        overrides["name"] = arguments.name

    keep_freed_memory()
    silence_orbax()  # until the process ends, because its threads outlive an error
    _join_processes(arguments)
    with parallel.end_if_another_dies():
        if arguments.resume:
            lifecycle.resume_run(arguments.resume, overrides)
            return
        config, text_sha256 = _config(arguments.config, overrides)
        if arguments.summary:
            print_summary(as_trained(config, text_sha256), arguments.summary == "full")
        else:
            lifecycle.start_run(config, Path(arguments.runs), text_sha256)


def check(parser: Parser, arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Refuse options that do not go together, and a CONFIG that is something else."""
    config = arguments.config
    starts = config is not None or "training.init_from" in overrides
    resumes = arguments.resume is not None
    if starts == resumes:
        parser.error(
            "give CONFIG, such as astra_alpha, or --init MODEL, or both (to start a run), or "
            "--resume RUN alone (to resume one)."
        )
    if arguments.resume and (arguments.name is not None or arguments.summary):
        parser.error("a resumed run keeps its name and sizes; leave out --name and --summary.")
    if config not in (None, *config_names()) and os.path.isdir(config):
        parser.error(f"{config} is a folder, not a config; --resume resumes a run.")
    if config and format_of(config):
        parser.error(f"{config} is a model, not a config; --init trains it further.")


def _join_processes(arguments: argparse.Namespace) -> None:
    """Join the other processes of the run, if there are any."""
    values = vars(arguments)
    least_values = {"processes": 1, "process": 0, "timeout": 1}
    for name, least in least_values.items():
        option = f"distributed.{name}"
        if values[option] is not None:
            check_whole(f"--{option}", values[option], 10**9, least=least)
    coordinator = values["distributed.coordinator"]
    number = values["distributed.processes"]
    index = values["distributed.process"]
    names_processes = (coordinator, number, index) != (None, None, None)
    if arguments.distributed or names_processes:
        parallel.join(coordinator, number, index, values["distributed.timeout"])


def _config(config: str | None, overrides: dict[str, Any]) -> tuple[Config, str]:
    """Return the config of a new run, and the SHA-256 of the text that it must have, or ""."""
    if config is not None:
        return load_config(config, overrides), ""
    init = overrides["training.init_from"]
    config_of_init = config_from(init, overrides)
    if "data.corpus" in overrides:
        return config_of_init, ""
    return config_of_init, find_model(init).text_sha256()  # the text is the model's own
