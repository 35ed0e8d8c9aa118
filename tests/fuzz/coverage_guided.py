"""Coverage-guided fuzzing of what is parsed in Python: python tests/fuzz/coverage_guided.py TARGET.

Optional: needs Google's atheris 3 (pip install atheris), which is no dependency of the tests.
TARGET is config or pickle; what follows goes to libFuzzer, such as -runs=200000 -max_len=400. A
crash is written into the working folder.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tomllib", "pickletools", "jaxgru.lm.config"]):
    import pickletools  # noqa: F401
    import tomllib  # noqa: F401

    from fuzzing import check_message

    from jaxgru.errors import UserError
    from jaxgru.lm.config import from_dict, parse_toml
    from jaxgru.lm.formats.pickles import check_pickle


def pickle(data: bytes) -> None:
    try:
        check_pickle(data)
    except (ValueError, IndexError):  # what it may raise; `load_pth_model` says it in a sentence
        pass


TARGETS = {"config": lambda data: from_dict(parse_toml(data)), "pickle": pickle}


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        try:
            target(data)
        except UserError as error:
            check_message(error)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
