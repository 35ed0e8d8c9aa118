"""What the scripts share: one sentence for a user's mistake, an option for each config field."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import jax

from jaxgru import load_pretrained, load_run
from jaxgru.config import SECTIONS, Config, dotted_names, nearest
from jaxgru.errors import UserError
from jaxgru.model import Params
from jaxgru.tokenizers import Tokenizer

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how JAX's errors of that kind begin


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence and exit 2; options are never abbreviated."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Prints the sentence and exits 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def parse_args(self, args=None, namespace=None):
        """As ever, but an unknown option names the nearest known one."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            self.error(f"there is no option {name}; the nearest is {self._nearest(name)}.")
        return known

    def _nearest(self, name: str) -> str:
        return nearest(name, self._option_string_actions)

    def add_model(self) -> None:
        """Adds the ways to name a trained or counted model, one of which is needed."""
        model = self.add_mutually_exclusive_group(required=True)
        model.add_argument("--run", help="a run folder, or a .safetensors or .pth file")
        model.add_argument("--pretrained", metavar="NAME", help="a model that ships with jaxgru")
        model.add_argument(
            "--ngram", type=int, metavar="N", help="a counted n-gram model of this order, 1 to 8"
        )
        self.add_argument("--config", help="whose text and tokens --ngram counts (astra_alpha)")

    def add_config_fields(self, config: Config) -> None:
        """Adds `--section.field` for every field; the defaults shown are the config's values."""
        for section in SECTIONS:
            if section == "published":
                continue
            group = self.add_argument_group(section)
            values = getattr(config, section)
            for field in dataclasses.fields(values):
                help = f"{field.metadata['help']} (default: {getattr(values, field.name)})"
                group.add_argument(
                    f"--{section}.{field.name}", metavar="VALUE", help=help.replace("%", "%%")
                )


def early_value(option: str) -> str | None:
    """An option's value on the command line, before the parser that knows the others is made."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, dest="value")
    try:
        return parser.parse_known_args()[0].value
    except argparse.ArgumentError:
        return None  # the option lacks its value; the parser that comes after says so


def load_model(arguments: argparse.Namespace) -> tuple[Params, Config, Tokenizer]:
    """The trained model that `Parser.add_model`'s options name.

    Raises:
      UserError: as the loaders do, or there is a --config.
    """
    if arguments.config is not None:
        raise UserError("--config belongs to --ngram; a trained model knows its own.")
    if arguments.pretrained is not None:
        return load_pretrained(arguments.pretrained)
    return load_run(arguments.run)


def config_overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """The config fields given on the command line, by dotted name."""
    given = vars(arguments)
    return {name: given[name] for name in dotted_names() if given.get(name) is not None}


def run_script(main: Callable[[], None]) -> NoReturn:
    """Runs a script: exits 2 with one line on stderr for a UserError, 130 after Ctrl-C.

    What does not fit in memory is the user's to make smaller, so that is one line, too.
    """
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        raise SystemExit(1) from None
    except UserError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and OUT_OF_MEMORY not in str(error):
            raise
        why = str(error).removeprefix(f"{OUT_OF_MEMORY}: ").splitlines()[:1] or ["MemoryError"]
        _refuse(
            f"the memory is too small ({why[0].rstrip('.')}); to train in less, raise "
            "--training.gradient_accumulation and lower --training.batch_size by as much, or set "
            "--training.remat true."
        )
    raise SystemExit(0)


def _refuse(sentence: str) -> NoReturn:
    print(f"{sys.argv[0].rsplit('/')[-1]}: {sentence}", file=sys.stderr)
    raise SystemExit(2) from None
