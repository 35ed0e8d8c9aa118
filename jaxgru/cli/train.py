"""Train a model from a config, train a model further, or resume a run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxgru.cli.options import Parser, config_overrides
from jaxgru.cli.summary import as_trained, print_summary
from jaxgru.errors import check_whole
from jaxgru.lm.config import Config, config_names, load_config
from jaxgru.lm.formats import NAMES, format_of
from jaxgru.lm.load import find_model
from jaxgru.lm.runs import lifecycle
from jaxgru.lm.runs.checkpoints import silence_orbax
from jaxgru.lm.runs.initial import config_from
from jaxgru.parallel import processes
from jaxgru.parallel.hardware import keep_freed_memory


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["train astra_alpha", "train astra_alpha --data.corpus my_text.txt --training.epochs 20",
         "train --init astra_beta --data.corpus my_text.txt --training.epochs 5",
         "train --resume runs/astra_alpha"],
        usage="(CONFIG | --init MODEL | --resume RUN) [options]",
    )  # fmt: skip
    group = parser.add_argument_group("run")
    add, config = group.add_argument, group.add_mutually_exclusive_group().add_argument
    config("config", metavar="CONFIG", nargs="?", default=argparse.SUPPRESS,
           help=f"{', '.join(config_names())}, or a .toml file; also as --config")  # fmt: skip
    config("--config", help=argparse.SUPPRESS)
    add("--init", metavar="MODEL", dest="training.init",
        help=f"start from the weights of this pretrained model, run folder or {NAMES} file; "
        "without CONFIG, its config applies, too")  # fmt: skip
    add("--resume", metavar="RUN", help="resume this run; it ends as if it had never stopped")
    add("--name", help="name of the run's folder (default: made from config and text)")
    add("--runs", metavar="FOLDER", default="runs",
        help="folder of all runs (default: %(default)s)")  # fmt: skip
    add("--summary", nargs="?", const="layers", choices=["layers", "full"],
        help="print the model's sizes and exit, with a row per layer or (full) per parameter"
        )  # fmt: skip
    parser.add_config_fields(*_shown_config())
    add = parser.add_argument_group("distributed (the same command in each process)").add_argument
    add("--distributed", action="store_true",
        help="join the processes that SLURM or Kubernetes started")  # fmt: skip
    add("--distributed.coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--distributed.processes", type=int, help="number of processes")
    add("--distributed.process", type=int, help="number of this process, from 0")
    add("--distributed.timeout", type=int, metavar="SECONDS", default=processes.JOIN_SECONDS,
        help="time to wait for the other processes (default: %(default)s)")  # fmt: skip
    return parser


def _shown_config() -> tuple[Config, str]:
    """Return the config whose values --help shows, the first that is named, and what to call it."""
    if {"-h", "--help"} & set(sys.argv):
        words = (word.removeprefix("--config=") for word in sys.argv[1:])
        for word in words:
            if word in config_names() or word.endswith(".toml"):
                return load_config(word), f"; {word}'s values are the defaults"
    return Config(), ""


def main() -> None:
    """Parse the arguments; train, resume or print a summary."""
    parser = make_parser()
    arguments = parser.parse_args()
    overrides = config_overrides(arguments)
    init = overrides.get("training.init")
    if (arguments.config is None and init is None) == (arguments.resume is None):
        parser.error(
            "give CONFIG, such as astra_alpha, or --init MODEL (to start a run), or --resume RUN "
            "(to resume one), and no more of them."
        )
    if arguments.resume and (arguments.name is not None or arguments.summary):
        parser.error("a resumed run keeps its name and sizes; leave out --name and --summary.")
    if arguments.config not in (None, *config_names()) and os.path.isdir(arguments.config):
        parser.error(f"{arguments.config} is a folder, not a config; --resume resumes a run.")
    if arguments.config and format_of(arguments.config):
        parser.error(f"{arguments.config} is a model, not a config; --init trains it further.")
    if arguments.name is not None:
        overrides["name"] = arguments.name

    keep_freed_memory()
    silence_orbax()  # until the process ends, because its threads outlive an error
    of = lambda name: getattr(arguments, f"distributed.{name}")
    for name, least in ("processes", 1), ("process", 0), ("timeout", 1):
        if of(name) is not None:
            check_whole(f"--distributed.{name}", of(name), 10**9, least=least)
    this = of("coordinator"), of("processes"), of("process")
    if arguments.distributed or this != (None, None, None):
        processes.join(*this, of("timeout"))
    with processes.end_if_another_dies():
        if arguments.resume:
            lifecycle.resume_run(arguments.resume, overrides)
            return
        text_sha256 = ""
        if arguments.config is not None:
            config = load_config(arguments.config, overrides)
        else:
            assert init is not None
            config = config_from(init, overrides)
            if "data.corpus" not in overrides:  # the text is the model's own
                text_sha256 = find_model(init).text_sha256()
        if arguments.summary:
            print_summary(as_trained(config, text_sha256), arguments.summary == "full")
        else:
            lifecycle.start_run(config, Path(arguments.runs), text_sha256)
