"""Names of configs and runs, and run folders that are links, loops, pipes or other oddities."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import jax
from fuzzing import Finding, Made
from mutations import text

import jaxgru
from jaxgru.libraries import import_torch
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import from_dict, load_config
from jaxgru.lm.data.tokenizers import CharacterTokenizer, load_tokenizer, read_tokenizer
from jaxgru.lm.formats.pth import load_pth_model
from jaxgru.lm.formats.safetensors import load_safetensors, save_safetensors
from jaxgru.lm.runs.folders import create_run, find_run, load_run_config, versions

MODEL = ModelConfig(vocab_size=3, embedding_dim=1, hidden_dim=1)
TOKENIZER = CharacterTokenizer("abc")
COUNT = itertools.count()
FILES: dict[str, bytes] = {}


def prepare(folder: Path) -> None:
    path = folder / "valid.safetensors"
    params = jaxgru.lm.init(jax.random.key(0), MODEL)
    save_safetensors(path, params, Config("x", MODEL), TOKENIZER)
    import_torch()  # it loads libraries when it is first imported
    FILES["model.safetensors"] = path.read_bytes()
    run = create_run(folder / "valid", Config("x", MODEL), TOKENIZER)
    FILES["config.toml"] = (run / "config.toml").read_bytes()
    FILES["tokenizer.json"] = (run / "tokenizer.json").read_bytes()


def name(rng: random.Random) -> str:
    parts = (
        "..",
        ".",
        "/",
        "~",
        "x",
        "latest",
        "v1",
        "v2",
        "",
        " ",
        "\0",
        "\n",
        "astra_alpha",
        ".toml",
        "-",
        "_",
        "\\",
        "CON",
        "a" * 256,
        "\udcff",
        "\u202e",
        "é",
        "*",
        "$(id)",
        "config.toml",
        "checkpoints",
        "\u0663",
        "configs/",
        "../configs/astra_alpha.toml",
    )
    return "".join(rng.choice(parts) for _ in range(rng.choice((1, 1, 2, 3))))


def make(rng: random.Random, folder: Path) -> Made:
    runs = folder / f"runs{next(COUNT)}"  # a new one a case, by number
    for old in folder.glob("runs*"):
        shutil.rmtree(old, ignore_errors=True)
    runs.mkdir()
    action = rng.choice(("name", "config", "create", "load", "load", "load", "run name"))
    if action in ("create", "load"):
        _furnish(rng, runs)
    return Made((action, runs, name(rng) if rng.random() < 0.9 else text(rng)), 10_000, runs)


def _furnish(rng: random.Random, runs: Path) -> None:
    """Fills runs/x with what a run folder has, some of it not what it should be."""
    family = runs / "x"
    if rng.random() < 0.15:
        return _odd(rng, family, b"")
    family.mkdir()
    for version in rng.sample(("v1", "v2", "v0", "v01", "v\u0663", "v99999", "vx"), 2):
        if rng.random() < 0.2:
            _odd(rng, family / version, b"")
            continue
        (family / version).mkdir()
        for file in ("config.toml", "tokenizer.json", "tokenizer.model", "checkpoints",
                     "metrics.jsonl"):  # fmt: skip
            if rng.random() < 0.3:
                _odd(rng, family / version / file, FILES.get(file, b"x"))
            elif file in FILES:
                (family / version / file).write_bytes(FILES[file])
    if rng.random() < 0.8:
        target = rng.choice(("v1", "v2", "latest", "..", "../x", "/", "/etc", "v1/config.toml",
                             "missing", "../../..", "v1/../v2", "."))  # fmt: skip
        if rng.random() < 0.9:
            (family / "latest").symlink_to(target)
        else:
            _odd(rng, family / "latest", b"")
    for file in ("model.safetensors", "model.pth", "model.json", "model.model", "model.toml"):
        if rng.random() < 0.3:
            _odd(rng, family / file, FILES.get(file, b"x"))


def _odd(rng: random.Random, path: Path, data: bytes) -> None:
    match rng.randrange(8):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to("missing")
        case 5:
            # to no folder but the runs' own: where runs/NAME is a link, create_run follows it
            path.symlink_to(rng.choice((".", "/etc/passwd", "/dev/null", "/dev/full")))
        case 6:
            path.write_bytes(b"")
        case 7:
            path.write_bytes(data)


def load(made: tuple[str, Path, str]) -> None:
    action, runs, given = made
    match action:
        case "name":
            config = from_dict({"name": given})
            if os.path.basename(config.name) != config.name or config.name in ("", ".", ".."):
                raise Finding(f"a name that is no folder's: {config.name!r}")
        case "config":
            load_config(given)
            raise_unless = given.endswith(".toml") or given in jaxgru.lm.config_names()
            if not raise_unless:
                raise Finding(f"a config outside: {given!r}")
        case "create":
            for config in (Config("x", MODEL), *_config(given)):
                run = create_run(runs, config, TOKENIZER)
                if run.parent.parent != runs:
                    raise Finding(f"a run outside: {run}")
                load_run_config(run)
                load_tokenizer(find_run(run.parent))
        case "run name":
            find_run(runs / given)
        case "load":
            _load_all(runs / "x")


def _config(given: str) -> list[Config]:
    return [Config(given, MODEL)] if given.isidentifier() and given.isascii() else []


def _load_all(family: Path) -> None:
    from jaxgru.errors import UserError

    calls: list[Any] = [lambda: list(map(load_run_config, versions(family)))]
    for place in (family, family / "v1", family / "latest", family / "v2"):
        calls += [lambda p=place: load_run_config(find_run(p)), lambda p=place: load_tokenizer(p)]
    calls += [
        lambda: load_safetensors(family / "model.safetensors"),
        lambda: load_pth_model(family / "model.pth"),
        lambda: read_tokenizer(family / "model.json"),
        lambda: read_tokenizer(family / "model.model"),
        lambda: load_config(family / "model.toml"),
        lambda: jaxgru.lm.load(family / "v1"),
    ]
    refused = None
    for call in calls:
        try:
            call()
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused
