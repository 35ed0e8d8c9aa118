"""Train a published model, any config, or a trained model on another text; or resume a run."""

from __future__ import annotations

from pathlib import Path

from jaxgru.cli.options import Parser, config_overrides, early_value
from jaxgru.cli.summary import as_trained, print_summary
from jaxgru.lm.config import Config, config_names, load_config
from jaxgru.lm.load import find_model
from jaxgru.lm.runs import lifecycle
from jaxgru.lm.runs.initial import config_from
from jaxgru.lm.runs.orbax import silence_orbax
from jaxgru.parallel import processes
from jaxgru.parallel.hardware import keep_freed_memory


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "train --config astra_alpha",
            "train --config astra_alpha --data.corpus my_text.txt --training.epochs 20",
            "train --init astra_beta --data.corpus my_text.txt --training.learning-rate 1e-3",
            "train --resume runs/astra_alpha",
        ],
        usage="%(prog)s (--config NAME | --init MODEL | --resume RUN) [options]",
    )
    add = parser.add_argument_group("run").add_argument
    add("--config", metavar="NAME", help=f"{', '.join(config_names())}, or a .toml file")
    add(
        "--init", metavar="MODEL", dest="training.init",
        help="start from the weights of this pretrained model, run folder or .safetensors file; "
        "without --config, its config applies, too",
    )  # fmt: skip
    add("--resume", metavar="RUN", help="resume this run exactly")
    add("--name", help="name of the run's folder (default: of config and text)")
    add("--runs", metavar="FOLDER", default="runs", help="folder of all runs (%(default)s)")
    add("--summary", nargs="?", const="layers", choices=["layers", "full"],
        help="print the model's sizes and exit, with a row per layer or (full) per parameter"
        )  # fmt: skip
    name = early_value("--config")  # --help shows this config's values
    parser.add_config_fields(load_config(name) if name else Config())
    add = parser.add_argument_group("distributed (the same command in each process)").add_argument
    add("--distributed", action="store_true", help="join those that SLURM, Kubernetes, … started")
    add("--distributed.coordinator", metavar="HOST:PORT", help="address of process 0",
        dest="coordinator")  # fmt: skip
    add("--distributed.processes", metavar="N", help="number of processes", dest="processes")
    add("--distributed.process", metavar="I", help="number of this one, from 0", dest="process")
    add("--distributed.timeout", metavar="SECONDS", dest="timeout", type=int,
        default=processes.JOIN_SECONDS,
        help="time to wait for the other processes (%(default)s)")  # fmt: skip
    return parser


def main() -> None:
    """Parse the arguments; train, resume or print a summary."""
    parser = make_parser()
    arguments = parser.parse_args()
    overrides = config_overrides(arguments)
    init = overrides.get("training.init")
    if (arguments.config is None and init is None) == (arguments.resume is None):
        parser.error(
            "give either --config NAME or --init MODEL (to start a run) or --resume RUN (to resume "
            "one)."
        )
    if arguments.resume and (arguments.name is not None or arguments.summary):
        parser.error("a resumed run keeps its name and sizes; leave out --name and --summary.")
    if arguments.name is not None:
        overrides["name"] = arguments.name

    keep_freed_memory()
    silence_orbax()  # until the process ends, because its threads outlive an error
    this = arguments.coordinator, arguments.processes, arguments.process
    if arguments.distributed or any(this):
        processes.join(*this, arguments.timeout)
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
