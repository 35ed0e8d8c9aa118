"""A kind of input whose loader does, case by case, what no loader may: see test_fuzz_loaders.py."""

from __future__ import annotations

import os
from pathlib import Path

from fuzzing import Made

from jaxgru.errors import UserError


def prepare(folder: Path) -> None:
    pass


def make(rng, folder: Path) -> Made:
    return Made((rng.number, folder))


def load(made: tuple[int, Path]) -> None:
    number, folder = made
    match number:
        case 0:
            return
        case 1:
            raise UserError("this is refused.")
        case 2:
            raise KeyError("x")
        case 3:
            (folder / "written").write_text("")
        case 4:
            os.system("true")
        case 5:
            bytearray(200 * 2**20)
        case 6:
            error = UserError("")
            error.args = ("a\nb",)
            raise error
        case 7:
            os.abort()
        case 8:
            try:
                bytearray(10**15)
            except MemoryError as error:
                raise UserError("this is refused.") from error
