"""The study's .pth files: spoilt, lying about storages, bombs, and pickles that would run code."""

from __future__ import annotations

import builtins
import collections
import functools
import importlib
import io
import operator
import os
import pathlib
import pickle
import random
import runpy
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import jax
import torch
from fuzzing import Finding, Made
from mutations import NUMBERS, mutate, text

import jaxgru
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.formats.pth import load_pth_model, save_pth

VALID: list[bytes] = []
CHECKPOINTS: list[dict[str, Any]] = []


def prepare(folder: Path) -> None:
    VALID.clear()
    CHECKPOINTS.clear()
    for model in (
        ModelConfig("gru", 5, 3, 4, num_layers=2, second_bias=True, reset_gate="before"),
        ModelConfig("lstm", 5, 3, 4, final_norm=True),
    ):
        path = folder / "valid.pth"
        save_pth(path, jaxgru.lm.init(jax.random.key(0), model), Config("x", model))
        VALID.append(path.read_bytes())
        CHECKPOINTS.append(torch.load(path, weights_only=True))
        torch.save(CHECKPOINTS[-1]["state_dict"], path)  # as the study's early stopping does
        VALID.append(path.read_bytes())
    prove(folder)


def make(rng: random.Random, folder: Path) -> Made:
    way = rng.choice((_spoilt, _archive, _metadata, _storages, _storages, _bomb, _code, _code))
    data = way(rng, folder)
    (folder / "input").write_bytes(data)
    path = folder / "input.pth"
    path.write_bytes(data)
    return Made(path, len(data))


def load(path: Path) -> None:
    params, config = load_pth_model(path)
    if 4 * jaxgru.lm.num_params(params) > path.stat().st_size:
        raise Finding("parameters larger than the file")
    repr(config)


def _spoilt(rng: random.Random, folder: Path) -> bytes:
    return mutate(rng, rng.choice(VALID))


# ---- pickles as PyTorch writes them, but for what they say


class Storage:
    """Stands for one of PyTorch's storages, by what its persistent id says."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple:
        return self.call

    def __hash__(self) -> int:
        return 0


class Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        return thing.parts if isinstance(thing, Storage) else None


def pickled(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


def archive(pickle_bytes: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """The zip file that torch.save makes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("archive/data.pkl", pickle_bytes)
        out.writestr("archive/byteorder", "little")
        for name, data in (records or {}).items():
            out.writestr(f"archive/data/{name}", data)
        out.writestr("archive/version", "3\n")
    return file.getvalue()


def checkpoint(rng: random.Random) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A valid one with its tensors as calls, and the records of their storages."""
    source = dict(rng.choice(CHECKPOINTS))
    state, records = {}, {}
    for i, (name, tensor) in enumerate(source["state_dict"].items()):
        records[str(i)] = tensor.numpy().tobytes()
        state[name] = rebuild(
            Storage("storage", torch.FloatStorage, str(i), "cpu", tensor.numel()),
            0, tuple(tensor.shape), tuple(tensor.stride()),
        )  # fmt: skip
    return source | {"state_dict": state}, records


def rebuild(storage: Any, offset: Any, shape: Any, stride: Any) -> Call:
    hooks = collections.OrderedDict()
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, shape, stride, False, hooks)


def _metadata(rng: random.Random, folder: Path) -> bytes:
    value, records = checkpoint(rng)
    state = value["state_dict"]
    for _ in range(rng.choice((1, 1, 2))):
        odd = rng.choice((
            None, 0, -1, 2**31, 2**62, 10**400, 10**5000, -(10**5000), 0.5, float("nan"),
            float("inf"), True, "", text(rng), "x" * 50_000, b"x", [], [[]], {}, (), {1, 2}, 1j,
            [10**5000], {"a": 10**5000}, "MyLSTMModel", "MyGRUModel", frozenset((1,)),
            collections.Counter("a"), torch.device("cpu"), torch.float32, torch.Size([2]),
        ))  # fmt: skip
        match rng.randrange(5):
            case 0 | 1:
                value[rng.choice(list(value))] = odd
            case 2:
                state[rng.choice(list(state))] = odd
            case 3:
                state[rng.choice((text(rng), 3, None, (1,), "x" * 5000, "a\nb"))] = (
                    rng.choice((odd, next(iter(state.values()))))
                )  # fmt: skip
            case 4:
                value.pop(rng.choice(list(value)))
        if not isinstance(value.get("state_dict"), dict) or not value["state_dict"]:
            break
        state = value["state_dict"]
    return archive(pickled(rng.choice((value, value, value, state))), records)


def _storages(rng: random.Random, folder: Path) -> bytes:
    """Tensors that say that they are larger, elsewhere, of another type, or not there."""
    value, records = checkpoint(rng)
    state = value["state_dict"]
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(list(state))
        key = str(list(state).index(name))
        if not hasattr(state[name], "call"):
            continue
        huge = rng.choice((*NUMBERS, -1, -(2**31)))
        kind = rng.choice((torch.FloatStorage, torch.FloatStorage, torch.DoubleStorage,
                           torch.ByteStorage, torch.BFloat16Storage, torch.ComplexDoubleStorage,
                           torch.UntypedStorage, torch.float32, "x", None))  # fmt: skip
        storage = Storage("storage", kind, rng.choice((key, key, "0", "99", "../data.pkl", "")),
                          rng.choice(("cpu", "cpu", "cpu", "cuda:0", "meta", "xla", "x", 3)),
                          rng.choice((huge, 20, 12, 16, 1, 0, "3", None)))  # fmt: skip
        shape = rng.choice(
            (
                (5, 3),
                (4,),
                (),
                (0,),
                (huge,),
                (huge, huge),
                (-1,),
                (2**31, 2**31),
                (1,) * 80,
                [5, 3],
                "x",
                None,
                (0, 2**62),
                (1.5,),
            )
        )
        stride = rng.choice(((3, 1), (1,), (0, 0), (), (huge,), (huge, 1), (-1, 1), (0,)))
        offset = rng.choice((0, 0, 1, huge))
        match rng.randrange(9):
            case 0 | 1:
                state[name] = rebuild(storage, offset, shape, stride)
            case 2:
                old = state[name].call[1]
                parts = list(old[0].parts) if isinstance(old[0], Storage) else [0] * 5
                parts[4] = huge
                state[name] = rebuild(Storage(*parts), *(old[1:4] if len(old) > 3 else (0, (), ())))
            case 3:
                old = state[name].call[1]
                state[name] = rebuild(old[0], offset, shape, stride)
            case 4:
                records[key] = rng.choice((b"", b"\0" * 3, bytes(4), bytes(100_000)))
            case 5:
                records.pop(key, None)
            case 6:
                state[name] = Call(torch._utils._rebuild_parameter, state[name], rng.choice(
                    (False, True, None, "x")), collections.OrderedDict())  # fmt: skip
            case 7:
                state[name] = Call(rng.choice((
                    torch._utils._rebuild_sparse_tensor,
                    torch._utils._rebuild_meta_tensor_no_storage,
                    torch._utils._rebuild_qtensor, torch._utils._rebuild_nested_tensor,
                    torch._utils._rebuild_device_tensor_from_numpy, torch._utils._rebuild_tensor,
                    torch._utils._rebuild_parameter_with_state,
                )), *rng.sample((torch.float32, (5, 3), (3, 1), False, huge, state[name], "cpu",
                                 torch.sparse_coo, storage), rng.choice((1, 3, 4, 5))))  # fmt: skip
            case 8:
                state[name] = Call(rng.choice((torch.Tensor, torch.nn.Parameter, torch.Size,
                                               torch.FloatTensor, torch.FloatStorage)),
                                   rng.choice((huge, shape, 2**29, state[name])))  # fmt: skip
    return archive(pickled(rng.choice((value, value, value, state))), records)


def _bomb(rng: random.Random, folder: Path) -> bytes:
    """Small files that would take all the memory, or all the time."""
    value, records = checkpoint(rng)
    size = rng.choice((10**8, 3 * 10**8, 10**9, 4 * 10**9, 10**12, 2**62))
    depth = rng.choice((30, 60, 500, 5000))
    match rng.randrange(11):
        case 0:
            return archive(pickled(value | {"version": Call(bytearray, size)}), records)
        case 1:  # b"\x8e": BYTEARRAY8, b"\x8a": LONG1, b"\x8b": LONG4; lengths that are not there
            opcode = rng.choice((b"\x8e", b"\x8d", b"\x96"))
            return archive(b"\x80\x05" + opcode + struct.pack("<Q", size % 2**63) + b"abc.")
        case 2:
            opcode = rng.choice((b"X", b"B", b"T", b"\x8b"))
            return archive(b"\x80\x02" + opcode + struct.pack("<I", size % 2**31) + b"abc.")
        case 3:  # a tuple of the one before twice over: its hash visits each of 2**depth
            layers = b"q\0" + b"h\0h\0\x86q\0" * depth
            return archive(b"\x80\x02}(K\x01" + layers + b"K\x01u.")
        case 4:
            return archive(b"\x80\x02" + b"(" * depth * 10 + b"t" * depth * 10 + b".")
        case 5:
            return archive(b"\x80\x02" + b"]" * depth * 100 + b"a" * (depth * 100 - 1) + b".")
        case 6:
            return archive(b"\x80\x02" + b"K\x01" * rng.choice((10**4, 10**6)) + b".")
        case 7:
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", rng.choice((8, 8, 12, 14))) as out:
                out.writestr("archive/data.pkl", pickled(value))
                out.writestr("archive/data/0", bytes(rng.choice((10**4, 10**7))))
                out.writestr("archive/version", "3\n")
            return file.getvalue()
        case 8:
            return _overlapping(rng, pickled(value), rng.choice((10, 1000, 5000)),
                                rng.choice((1000, 10**6)))  # fmt: skip
        case 9:  # the same values again and again: repr and comparison visit each
            layers = b"q\0" + b"](h\0h\0eq\0" * depth
            key = rng.choice((b"dropout", b"version", b"model_class", b"hidden_dim"))
            return archive(b"\x80\x02}(X" + struct.pack("<I", len(key)) + key + b"K\x01" + layers
                           + b"u.")  # fmt: skip
        case _:
            return archive(pickled(value | {
                "model_name": Call(collections.Counter, {i: 2**62 for i in range(9)}),
                "version": Call(collections.OrderedDict, [(i, i) for i in range(9)]),
            }), records)  # fmt: skip


def _overlapping(rng: random.Random, pickle_bytes: bytes, count: int, size: int) -> bytes:
    """A directory of `count` entries that are all one and the same member (Fifield 2019)."""
    data = archive(pickle_bytes, {"0": bytes(size)})
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        at = file.start_dir
        end = data.rindex(b"PK\5\6")
        directory = data[at:end]
        entry = [part for part in directory.split(b"PK\1\2")[1:] if b"data/0" in part][0]
    directory += (b"PK\1\2" + entry) * count
    total = (len(file.infolist()) + count) & 0xFFFF
    tail = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, total, total, len(directory), at, 0)
    return data[:at] + directory + tail


def _archive(rng: random.Random, folder: Path) -> bytes:
    """The zip's own numbers: sizes, methods, offsets, flags, names."""
    data = bytearray(rng.choice(VALID))
    for _ in range(rng.choice((1, 2, 4))):
        marks = [i for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
                 for i in _all(data, mark)]  # fmt: skip
        if not marks:
            break
        at = rng.choice(marks) + rng.randrange(4, 46)
        width = rng.choice((1, 2, 4))
        value = rng.choice(NUMBERS) % 2 ** (8 * width)
        data[at : at + width] = value.to_bytes(width, "little")
    return bytes(data)


def _all(data: bytes, part: bytes) -> list[int]:
    found, at = [], data.find(part)
    while at >= 0:
        found.append(at)
        at = data.find(part, at + 1)
    return found


# ---- code


def payloads(folder: Path) -> list[Call]:
    """Calls that make a file or folder in `folder`, each by another way to a callable."""
    spot = str(folder / "witness")
    module = folder / "witness_module.py"
    module.write_text(f"open({spot!r}, 'w').close()\n")
    source = f"open({spot!r}, 'w').close()"
    return [
        Call(os.mkdir, spot),
        Call(os.system, f"mkdir {spot}"),
        Call(os.makedirs, spot),
        Call(subprocess.call, ["mkdir", spot]),
        Call(subprocess.check_output, ["mkdir", spot]),
        Call(builtins.eval, source),
        Call(builtins.exec, source),
        Call(builtins.open, spot, "w"),
        Call(builtins.__import__, "witness_module"),
        Call(importlib.import_module, "witness_module"),
        Call(runpy.run_path, str(module)),
        Call(shutil.copy, str(module), spot),
        Call(os.symlink, "x", spot),
        Call(pathlib.Path.touch, Call(pathlib.PosixPath, spot)),
        Call(operator.methodcaller("touch"), Call(pathlib.PosixPath, spot)),
        Call(functools.partial(os.mkdir, spot)),
        Call(map, os.mkdir, [spot]),
        Call(list, Call(map, os.mkdir, [spot])),
        Call(torch.serialization.load, str(folder / "evil.pkl")),
        Call(torch.save, 1, spot),
        Call(io.open, spot, "w"),
        Call(getattr, Call(builtins.__import__, "os"), "mkdir"),
        Call(torch.hub.load, str(folder), "x"),
        Call(zipfile.ZipFile, spot, "w"),
    ]


def prove(folder: Path) -> None:
    """That the witness would tell: an ordinary unpickler runs these."""
    import sys

    sys.path.insert(0, str(folder))
    told = 0
    for payload in payloads(folder):
        sys.modules.pop("witness_module", None)
        try:
            pickle.loads(pickle.dumps(payload))
        except Exception:  # some need more than this
            pass
        told += _clear(folder)
    if told < 15:
        raise AssertionError(f"only {told} payloads would have told")


def _clear(folder: Path) -> bool:
    spot = folder / "witness"
    there = spot.is_dir() or spot.exists() or spot.is_symlink()
    if spot.is_dir():
        spot.rmdir()
    elif there:
        spot.unlink()
    return there


def _code(rng: random.Random, folder: Path) -> bytes:
    _clear(folder)
    payload = rng.choice(payloads(folder))
    protocol = rng.choice((0, 1, 2, 2, 3, 4, 5))
    value, records = checkpoint(rng)
    spot = str(folder / "witness").encode()
    match rng.randrange(8):
        case 0:
            value = payload
        case 1:
            value[rng.choice(list(value))] = payload
        case 2:
            value["state_dict"][rng.choice(list(value["state_dict"]))] = payload
        case 3:  # as the state of something that is allowed
            value["version"] = Call(collections.OrderedDict, state={"__reduce__": payload})
        case 4:
            value[rng.choice(((payload, 1), "x"))] = payload
        case 5:  # opcodes that no pickler writes today: INST, OBJ
            data = rng.choice((
                b"(S'" + spot + b"'\nios\nmkdir\n.",
                b"(cos\nmkdir\nS'" + spot + b"'\no.",
                b"cos\nmkdir\n(S'" + spot + b"'\ntR.",
                b"cbuiltins\nopen\n(S'" + spot + b"'\nS'w'\ntR.",
                b"ctorch._utils\nos.mkdir\n(S'" + spot + b"'\ntR.",
                b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93(\x8c" + bytes([len(spot) % 256]) + spot
                + b"tR.",
                b"\x80\x02\x82\x01.", b"\x80\x02cos\nmkdir\n)\x81.", b"\x80\x02P1\n.",
                b"\x80\x02cnumpy\nload\n(S'" + spot + b"'\ntR.",
            ))  # fmt: skip
            return rng.choice((archive(data), data))
        case 6:  # the file of old, which is no archive
            return pickle.dumps(payload, protocol)
        case 7:
            data = archive(pickled(payload, protocol))
            return mutate(rng, data, times=1)
    return archive(pickled(value, protocol), records)
