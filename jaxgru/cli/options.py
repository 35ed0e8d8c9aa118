"""What the commands share: options for config fields and models, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax

from jaxgru.errors import UserError
from jaxgru.files import reason, write_bytes
from jaxgru.lm import Found, find_model, pretrained_names
from jaxgru.lm.config import SECTIONS, Config, DataConfig, choices, dotted_names, field_types
from jaxgru.lm.formats import NAMES
from jaxgru.printing import nearest, printable, warn

Formatter: Any = argparse.HelpFormatter
with contextlib.suppress(ModuleNotFoundError):  # in colour on a terminal
    from rich_argparse import RichHelpFormatter as Formatter

    Formatter.group_name_formatter = str  # not str.title
    Formatter.help_markup = Formatter.text_markup = False

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-inf$|-nan$", re.IGNORECASE)
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", bool: "{true,false}", Path: "FILE"}
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how JAX's errors of that kind begin


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence; options cannot be abbreviated.

    "-" and "_" are the same in the names of options. A text is not empty, as that of an unset
    variable is. The examples, such as "train astra_alpha", end the help; `usage` is what its first
    line shows after the command's name, if not every option.
    """

    def __init__(
        self, description: str | None, examples: Sequence[str] = (), usage: str | None = None
    ) -> None:
        super().__init__(
            prog=os.path.basename(sys.argv[0]),
            usage=usage and f"%(prog)s {usage}",
            description=description,
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        self.examples = examples
        self._negative_number_matcher = NEGATIVE_NUMBER  # argparse's own lacks -5e-1 and -inf
        self.register("type", bool, _true_or_false)
        self.register("type", None, _not_empty)
        self.register("type", Path, _path)

    def format_help(self) -> str:
        """Return the help: what kind of value each option takes, and at its end the examples."""
        for action in self._actions:
            if action.option_strings and action.nargs != 0 and not action.choices:
                action.metavar = action.metavar or METAVARS.get(action.type, "TEXT")
        text = super().format_help()
        if self.examples:
            text += "\nexamples:\n"
        for example in self.examples:
            text += f"  jaxgru {example}\n"
        return text

    def error(self, message: str) -> NoReturn:
        """Print the sentence, ours or argparse's, without the usage; exit 2."""
        _end(printable(message))

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  its overloads
        """Parse the arguments; an unknown option is an error that names what was probably meant."""
        words = sys.argv[1:] if args is None else args
        options = {option.replace("_", "-"): option for option in self._option_string_actions}
        return super().parse_args(
            [self._with_declared_name(word, options) for word in words], namespace
        )

    def _with_declared_name(self, word: str, options: dict[str, str]) -> str:
        """Return a word with the option in it, if any, as it was declared.

        Args:
          options: each as it was declared, by its name with dashes only.
        """
        name, equals, value = word.partition("=")
        option = options.get(name.replace("_", "-"))
        if option is not None:
            return option + equals + value
        looks_like_option = re.fullmatch(r"--?[A-Za-z]\S*", name)
        if looks_like_option and not NEGATIVE_NUMBER.match(word):
            suggestion = nearest(name, options.values(), "--help lists the options")
            self.error(f"there is no option {name}; {suggestion}.")
        return word

    def add_model(self, default: str | None = None) -> None:
        """Add what names a trained or an n-gram model: a word, MODEL, or --ngram."""
        group = self.add_argument_group("model")
        otherwise = f" (default: {default})" if default else ""
        model = group.add_mutually_exclusive_group()
        model.add_argument(
            "model",
            metavar="MODEL",
            nargs="?",
            help=f"a pretrained model ({', '.join(pretrained_names())}), the folder of a run, or a "
            f"{NAMES} file{otherwise}",
        )
        model.add_argument(
            "--ngram",
            type=int,
            metavar="ORDER",
            choices=range(1, 9),
            help="count an n-gram model of this order, 1 to 8, instead",
        )
        group.add_argument(
            "--config",
            metavar="CONFIG",
            help="config whose text --ngram counts (default: astra_alpha)",
        )
        self.add_epoch(group)

    def add_epoch(self, group: Any) -> None:
        """Add --epoch to a group of options or to the parser itself."""
        group.add_argument(
            "--epoch",
            choices=["best", "last"],
            help="of a run: the epoch with the lowest validation loss, or the last (default: with "
            "early stopping the best, else the last)",
        )

    def check_output(self, path: Path, suffix: str) -> None:
        """Refuse a file that could not be written, before anything slow starts."""
        if path.suffix != suffix:
            self.error(f"--output is {path}; it must end in {suffix}.")
        if not os.access(path.parent, os.W_OK):
            self.error(f"{path} cannot be written: no file can be created in {path.parent}.")

    def add_encoding(self, add: Callable[..., Any], of: str) -> None:
        """Add --encoding, which is that of the text that the option `of` names."""

        def encoding(name: str) -> str:
            try:
                return DataConfig(encoding=name).encoding
            except UserError as error:
                raise argparse.ArgumentTypeError(str(error)) from error

        help = f"encoding of {of}, by Python's name for it, such as cp1252 (default: utf-8)"
        add("--encoding", metavar="NAME", type=encoding, help=help)

    def add_config_fields(self, config: Config, of: str = "") -> None:
        """Add `--section.field` for every field; the help shows the config's values as defaults."""
        for section, cls in SECTIONS.items():
            group = self.add_argument_group(f"{section} (fields of the config{of})")
            values = getattr(config, section)
            for field in dataclasses.fields(cls):
                option = _field_option(cls, field, getattr(values, field.name))
                dotted = f"{section}.{field.name}"
                if dotted == "training.init_from":  # which --init sets
                    option["help"] = argparse.SUPPRESS
                group.add_argument(f"--{dotted}", **option)


def _field_option(
    section: type[Any], field: dataclasses.Field[Any], default: object
) -> dict[str, Any]:
    """Return what `add_argument` takes for a field of the config."""
    allowed = choices(section, field)
    names = ", ".join(allowed)
    is_long = len(names) > 60  # for the line of an option
    help = section.help_of(field)
    if is_long and allowed[0] not in help:
        help += f": {names}"
    help += f" (default: {shlex.quote(printable(typed(default)))})"
    kind = str if allowed else field_types(section)[field.name]
    if field.metadata["escaped"]:
        kind = unescaped
    return {
        "type": kind,
        "choices": allowed or None,
        "metavar": "NAME" if is_long else None,
        "help": help.replace("%", "%%"),
    }


def _true_or_false(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected one argument, not an empty one")
    return text


def _path(text: str) -> Path:
    return Path(_not_empty(text))


def value_of(arguments: argparse.Namespace, option: str) -> Any:
    """Return the value of an option, such as of "--num-tokens"."""
    return getattr(arguments, option.removeprefix("--").replace("-", "_"))


def write_output(path: Path | None, parts: Iterable[str]) -> None:
    """Write what a command makes as one file or, where there is no path, print each part at once.

    What a text has that is not UTF-8 is written as it was read, as to standard output.
    """
    if path is None:
        for part in parts:
            print(part, end="", flush=True)
        return
    whole = "".join(parts)
    with written(path):
        write_bytes(path.resolve(), whole.encode(errors="surrogateescape"))


@contextlib.contextmanager
def written(path: Path) -> Generator[None]:
    """Name the file that cannot be written inside the context.

    Raises:
      UserError: an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason(error)}.") from error


def unescaped(text: str) -> str:
    r"""Return the text with \n, \r, \t and \\ replaced by what they stand for; no shell does it."""
    characters = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}
    return re.sub(r"\\[nrt\\]", lambda match: characters[match[0]], text)


def typed(value: object) -> str:
    """Return a field's value as it is typed on a command line."""
    text = str(value)
    return text.lower() if isinstance(value, bool) else text


def trained_model(arguments: argparse.Namespace, default: str | None = None) -> Found:
    """Return where the trained model is that `Parser.add_model`'s arguments name.

    Raises:
      UserError: they name none, or --config goes with one.
    """
    model = arguments.model or default
    if model is None:
        raise UserError("name a model, such as astra_beta or runs/NAME, or give --ngram N.")
    if arguments.config is not None:
        raise UserError("--config is for --ngram only; a trained model has its own config.")
    return find_model(model)


def config_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the config fields given on the command line, by dotted name."""
    values = vars(arguments)
    return {name: values[name] for name in dotted_names() if values.get(name) is not None}


def run_command(name: str) -> NoReturn:
    """Pass `main` of the module `jaxgru.cli.<name>`, which alone is imported, to `run_script`."""
    run_script(lambda: importlib.import_module(f"jaxgru.cli.{name}").main())


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a command: exit 2 with one line on stderr for a mistake, 130 after Ctrl-C.

    Mistakes are a UserError, a lack of memory or of the device that was asked for, and a full disk
    behind standard output. If the reader of standard output has gone, exit 1 in silence.
    """
    _prepare_process()
    try:
        code = _exit_code(main)
        print(end="", flush=True)
    except KeyboardInterrupt:  # as training raises it, once everything is saved
        code = 130
    except UserError as error:
        _end(str(error))
    except OSError as error:
        if error.filename is not None:
            raise
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # the reader has gone, for example `head`
            _end(f"{reason(error)}.")
        code = 1
    except Exception as error:
        if isinstance(error, MemoryError) or OUT_OF_MEMORY in str(error):
            _end(_out_of_memory(error))
        _end_without_device()
        raise
    raise SystemExit(code)


def _prepare_process() -> None:
    """Set what Ctrl-C does, and what standard output and standard error take."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup` ignores it
        signal.signal(signal.SIGINT, _end_at_once)
    if isinstance(sys.stdout, io.TextIOWrapper):  # None: it is closed
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    if sys.stderr is None:  # closed: what is opened next would get its number, and what C++ writes
        sys.stderr = open(os.devnull, "w")


def _exit_code(main: Callable[[], None]) -> str | int | None:
    """Run a command; return the exit code with which it ends."""
    try:
        main()
    except SystemExit as stop:  # as after --help
        return stop.code
    return 0


def _out_of_memory(error: Exception) -> str:
    """Return a sentence about a lack of memory and, of training, what needs less."""
    message = str(error) or "MemoryError"
    why = message.removeprefix(f"{OUT_OF_MEMORY}: ").splitlines()[0].rstrip(".")
    if "train" not in os.path.basename(sys.argv[0]):
        return f"out of memory ({why})."
    return (
        f"out of memory ({why}); to train in less, raise --training.gradient_accumulation and "
        "lower --training.batch_size by as much, or set --training.remat true."
    )


def _end_without_device() -> None:
    """End the process if the environment asks for a device that JAX does not have."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if not platforms:
        return
    try:
        jax.devices()
    except Exception:  # without CUDA, an AssertionError with no message
        _end(
            f"JAX_PLATFORMS is {platforms!r}, but JAX has no such device here; unset it, and JAX "
            "uses what is available."
        )


def _end_at_once(number: int, frame: Any) -> None:
    """End the process without an exception.

    One that is raised within a callback of JAX's disappears, and Python's shutdown crashes while
    XLA compiles.
    """
    with contextlib.suppress(Exception):  # as where it interrupts a write
        sys.stdout.flush()
        if sys.stderr.isatty():
            print("\x1b[?25h", end="", file=sys.stderr, flush=True)  # a status hides the cursor
    os._exit(130)


def _end(sentence: str) -> NoReturn:
    warn(f"{os.path.basename(sys.argv[0])}: {sentence}")
    raise SystemExit(2) from None


def _discard(stream: TextIO) -> None:
    """Discard what cannot be written to a stream; Python flushes it when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
