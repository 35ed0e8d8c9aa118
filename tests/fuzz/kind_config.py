"""Config files: TOML that is damaged, nested, huge, mistyped; and values typed as options."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

import jax
import tomli_w
from fuzzing import Finding, Made
from mutations import mutate, text

import jaxgru
from jaxgru.cli.options import parse_fields
from jaxgru.lm.config import SECTIONS, config_names, dotted_names, from_dict, load_config, to_dict

VALID: list[bytes] = []


def prepare(folder: Path) -> None:
    VALID[:] = [tomli_w.dumps(to_dict(load_config(name))).encode() for name in config_names()]


def make(rng: random.Random, folder: Path) -> Made:
    way = rng.choice((_spoilt, _spoilt, _generated, _generated, _odd))
    data = way(rng)
    path = folder / "input"
    path.unlink(missing_ok=True)
    path = path.with_suffix(".toml")
    path.write_bytes(data)
    (folder / "input").write_bytes(data)  # kept with a finding
    overrides = {}
    if rng.random() < 0.3:
        overrides = {rng.choice((*dotted_names(), text(rng))): _typed(rng)}
    return Made((path, overrides), len(data) + sum(map(len, overrides.values())))


def load(made: tuple[Path, dict[str, str]]) -> None:
    path, overrides = made
    config = load_config(path, parse_fields(overrides))
    again = from_dict(tomllib.loads(tomli_w.dumps(to_dict(config))))
    if repr(again) != repr(config):  # NaN equals nothing
        raise Finding(f"config that is not the same when written and read: {config.name}")
    str(path.parent / config.name).encode()
    if config.model.num_layers <= 8:
        jax.eval_shape(lambda: jaxgru.lm.init(jax.random.key(0), config.model))


def _typed(rng: random.Random) -> str:
    return rng.choice((
        text(rng), str(rng.choice((0, 1, -1, 2**40, 2**64))), "9" * 5000, "1" * 400 + ".0",
        "0x10", "1_000", " 5 ", "\u0663", "true", "nan", "-inf", "1e-400", "\udcff", "[1]",
        "x" * 100_000,
    ))  # fmt: skip


def _spoilt(rng: random.Random) -> bytes:
    return mutate(rng, rng.choice(VALID))


def _value(rng: random.Random, depth: int = 0) -> str:
    simple = (
        "0", "1", "-1", "3", "0.5", "1e-3", "1e400", "nan", "inf", "true", "false", '""', '"gru"',
        '"characters"', '"state"', "'x'", "9" * rng.choice((10, 20, 400, 4000, 5000)),
        "0x" + "f" * rng.choice((8, 16, 5000, 10_000)), "0o7", "0b1", "1979-05-27",
        "07:32:00", "1979-05-27T00:32:00.999999-07:00", "1_0", '"""a\nb"""', r'"\u0000"',
        r'"\u202e"', r'"\ud800"', r'"\U00110000"', r'"\n"', '"' + "x" * 20_000 + '"',
        '"' + text(rng).replace("\\", "\\\\").replace('"', '\\"') + '"',
    )  # fmt: skip
    if depth < 4 and rng.random() < 0.3:
        parts = [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        if rng.random() < 0.7:
            return f"[{', '.join(parts)}]"
        return "{" + ", ".join(f"{rng.choice('abc')} = {part}" for part in parts) + "}"
    return rng.choice(simple)


def _generated(rng: random.Random) -> bytes:
    """A file of known and unknown sections and fields, each with any value."""
    lines = []
    if rng.random() < 0.5:
        lines.append(f"name = {_value(rng)}")
    for section in SECTIONS:
        if rng.random() < 0.5:
            continue
        kind = rng.random()
        if kind < 0.05:
            lines.insert(0, f"{section} = {_value(rng)}")
            continue
        lines.append(f"[[{section}]]" if kind < 0.1 else f"[{section}]")
        known = [name for name in dotted_names() if name.startswith(section)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            name = rng.choice(known).split(".")[1]
            if rng.random() < 0.1:
                name = rng.choice((f'"{name}\\n"', "x" * 5000, '""', "a.b.c", name + "s"))
            lines.append(f"{name} = {_value(rng)}")
    return rng.choice(("\n", "\r\n")).join(lines).encode("utf-8", "surrogatepass")


def _odd(rng: random.Random) -> bytes:
    n = rng.choice((10, 100, 1000, 10_000, 30_000, 100_000))
    return rng.choice((
        lambda: b"a = " + b"[" * n,
        lambda: b"a = " + b"[" * n + b"]" * n,
        lambda: b"a = " + b"{a = " * n + b"1" + b"}" * n,
        lambda: b'name = "' + b"x" * n + b'"',
        lambda: b"x" * n + b" = 1",
        lambda: b"[model]\ncell = [[" + b"1," * n + b"]]",
        lambda: b"[training]\nlearning_rate = 0x" + b"f" * n,
        lambda: b"[training]\nweight_drop = [" + b"[]," * n + b"]",
        lambda: b"[training]\nepsilon = 1" + b"0" * rng.choice((10, 308, 309, 400)),
        lambda: b'[data]\ncorpus = "' + b"x" * n + b'"\nsha256 = "' + b"y" * n + b'"',
        lambda: b"[model]\nnum_layers = 1099511627775",
        lambda: b"\xef\xbb\xbf" + rng.choice(VALID),
        lambda: rng.choice(VALID).replace(b"\n", b"\r"),
        lambda: rng.choice(VALID).decode().encode("utf-16"),
        lambda: rng.choice(VALID) * 2,
        lambda: b"\0" * n,
        lambda: b"#" * n,
        lambda: b"# \0",
        lambda: b"\n" * n,
        lambda: rng.randbytes(min(n, 1000)),
        lambda: b"".join(b"[a%d]\n" % i for i in range(min(n, 3000))),
    ))()  # fmt: skip
