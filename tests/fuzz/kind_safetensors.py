"""Whole models in .safetensors: spoilt, and headers that lie though their hash agrees."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
from pathlib import Path

import jax
import numpy as np
from fuzzing import Made
from kind_sentencepiece import learn_pieces
from kind_sentencepiece import spoil as spoil_pieces
from mutations import NUMBERS, mutate, text

import jaxgru
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats.safetensors import (
    load_safetensors,
    load_safetensors_config,
    save_safetensors,
)

VALID: list[bytes] = []
DTYPES = ("F32", "F64", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "f32", "", "X")


def prepare(folder: Path) -> None:
    pieces = learn_pieces()
    models = [
        (ModelConfig(vocab_size=4, embedding_dim=2, hidden_dim=3, num_layers=2),
         CharacterTokenizer('\na"é')),
        (ModelConfig("lstm", 4, 2, 3, final_norm=True), CharacterTokenizer("abcd")),
        (ModelConfig("mlp", 4, 2, 3, context_length=2), CharacterTokenizer("abcd")),
        (ModelConfig(vocab_size=pieces.vocab_size, embedding_dim=1, hidden_dim=1), pieces),
    ]  # fmt: skip
    VALID.clear()
    for i, (model, tokenizer) in enumerate(models):
        path = folder / f"valid{i}.safetensors"
        params = jaxgru.lm.init(jax.random.key(i), model)
        save_safetensors(path, params, Config(f"model{i}", model), tokenizer)
        VALID.append(path.read_bytes())


def make(rng: random.Random, folder: Path) -> Made:
    data = rng.choice((_spoilt, _header, _header, _contents, _contents))(rng)
    (folder / "input").write_bytes(data)
    path = folder / "input.safetensors"
    path.write_bytes(data)
    return Made(path, len(data))


def load(path: Path) -> None:
    alone = load_safetensors_config(path)
    params, config, tokenizer = load_safetensors(path)
    assert alone == config
    text = tokenizer.decode(np.arange(tokenizer.vocab_size))
    tokenizer.num_characters(tokenizer.encode(text), text)
    assert jaxgru.lm.num_params(params) * 4 < path.stat().st_size
    repr(config)


def parse(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def build(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _rehash(header: dict, data: bytes) -> None:
    """Makes the check sum agree, so that what comes before it is what refuses the file."""
    metadata = header.get("__metadata__", {})
    others = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256()
    for name in sorted(header.keys() - {"__metadata__"}):
        try:
            digest.update(data[slice(*header[name]["data_offsets"])])
        except (TypeError, KeyError, ValueError):
            return
    digest.update(json.dumps(others, sort_keys=True).encode())
    metadata["sha256"] = digest.hexdigest()


def _spoilt(rng: random.Random) -> bytes:
    return mutate(rng, rng.choice(VALID))


def _header(rng: random.Random) -> bytes:
    """A header of JSON that says something else: dtypes, shapes, offsets, names, its length."""
    header, data = parse(rng.choice(VALID))
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(names)
        about = header.get(name) or {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        header[name] = about
        number = rng.choice((*NUMBERS, -1, 0.5, None, "1", 2**64, 2**70))
        match rng.randrange(14):
            case 0:
                about["dtype"] = rng.choice(DTYPES)
            case 1:
                about["shape"] = [number] * rng.choice((1, 2, 3, 64, 1000))
            case 2:
                about["shape"] = rng.choice(
                    (
                        [],
                        [0],
                        [2**62, 4],
                        [2**32, 2**32],
                        [0, 2**63],
                        [-1],
                        [1] * 100,
                        None,
                        3,
                        "x",
                        [[1]],
                        {"a": 1},
                    )
                )
            case 3:
                about["data_offsets"][rng.randrange(2)] = number
            case 4:
                about["data_offsets"] = header[rng.choice(names)]["data_offsets"]
            case 5:
                about["data_offsets"] = rng.choice(([], [0], [4, 0], None, [0, 0], [0, 4, 8]))
            case 6:
                about.pop(rng.choice(sorted(about)))
            case 7:
                header[text(rng) or "x"] = dict(about)
            case 8:
                header[name] = rng.choice((None, [], 3, "x", {}))
            case 9:
                header["__metadata__"] = rng.choice((None, [], {"format": 3}, {"a": {}}, "x", {}))
            case 10:
                about[rng.choice(("extra", text(rng)))] = text(rng)
            case 11:
                header.pop(name)
                header[f"{name}\n" + text(rng)] = about
            case 12:
                return build(header, data, rng.choice((*NUMBERS, 2**64 - 1)) % 2**64)
            case 13:
                n = rng.choice((100, 10_000, 100_000))
                return build(rng.choice((
                    b"[" * n, b'{"a":' * n, b'{"__metadata__":{"a":"' + b"x" * n + b'"}}',
                    b"{" + b'"a":{},' * n + b'"b":{}}', b"\0" * n, b"", b"{}", b"\xff\xfe{}",
                    b'{"a":NaN}', b"{" + b",".join(
                        b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i
                        for i in range(min(n, 3000))) + b"}",
                )), data)  # fmt: skip
        names = [name for name in header if name != "__metadata__"] or ["x"]
        header = (
            {k: v for k, v in header.items() if isinstance(v, dict) or k == "__metadata__"}
            if (rng.random() < 0.9)
            else header
        )
        names = [name for name in names if isinstance(header.get(name), dict)] or ["x"]
        for name in names:
            if isinstance(header.get(name), dict):
                header[name].setdefault("data_offsets", [0, 4])
                if not isinstance(header[name]["data_offsets"], list) or (
                    len(header[name]["data_offsets"]) < 2
                ):
                    return build(header, data)
    if isinstance(header.get("__metadata__"), dict) and rng.random() < 0.8:
        _rehash(header, data)
    return build(header, data)


def _contents(rng: random.Random) -> bytes:
    """Metadata that lie: the config, the tokenizer; the hash agrees with them."""
    header, data = parse(rng.choice(VALID))
    metadata = header["__metadata__"]
    n = rng.choice((10, 1000, 10_000, 100_000))
    match rng.randrange(8):
        case 0:
            metadata["config"] = mutate(rng, metadata["config"].encode()).decode(errors="replace")
        case 1:
            metadata["config"] = rng.choice((
                "a = " + "[" * n, "a." * n + "a = 1", "x" * n, "", 'name = "../x"',
                "[model]\nnum_layers = 1099511627775",
                f"[model]\nnum_layers = {rng.choice((30, 1000, 2**31, 2**39))}\n",
                "[model]\nvocab_size = 1099511627775\nhidden_dim = 1099511627775",
                "[model]\nhidden_dim = 0x" + "f" * n,
                "[training]\nlearning_rate = 0x" + "f" * n,
            ))  # fmt: skip
        case 2:
            old = metadata["tokenizer_data"]
            if metadata["tokenizer"] == "sentencepiece":
                model = spoil_pieces(rng, base64.b64decode(old))
                metadata["tokenizer_data"] = base64.b64encode(model).decode()
            else:
                spoilt = mutate(rng, old.encode()).decode(errors="replace")
                metadata["tokenizer_data"] = spoilt
        case 3:
            metadata["tokenizer_data"] = rng.choice((
                "[" * n, '{"characters": "' + "x" * n + '"}', "", "null", "9" * 5000, "\0" * 10,
                '{"characters": "\\ud800abc"}', '{"characters": "\\ud83c\\udfad\\u0000b"}',
                json.dumps({"characters": text(rng)}),
            ))  # fmt: skip
        case 4:
            metadata["tokenizer"] = rng.choice(("characters", "sentencepiece", "x" * n, text(rng)))
        case 5:
            metadata[rng.choice((*metadata, text(rng)))] = text(rng)
        case 6:
            metadata["config"] = metadata["config"].replace(
                rng.choice(("hidden_dim = ", "vocab_size = ", "num_layers = ", "embedding_dim = ")),
                "# ",
            )
        case 7:
            at = rng.randrange(len(data) - 4)
            special = rng.choice((float("nan"), float("inf"), -0.0, 1e-45))
            data = data[:at] + struct.pack("<f", special) + data[at + 4 :]
    if rng.random() < 0.9:
        _rehash(header, data)
    return build(header, data)
