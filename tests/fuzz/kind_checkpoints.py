"""Run folders with a checkpoint that lies: its files, their names, checksums, sizes and arrays."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from fuzzing import Finding, Made
from mutations import NUMBERS, TEXTS, mutate, text

import jaxgru
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import TrainingConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.files import hashes
from jaxgru.lm.runs.checkpoints import restore, save
from jaxgru.lm.runs.folders import create_run, load_run_config
from jaxgru.lm.runs.orbax import CHECKSUMS, open_checkpoints
from jaxgru.lm.training import Epoch, Progress, init_state

COUNT = itertools.count()
ITEMS = ("params", "optimizer", "best")
RECORD = {"epoch": 1, "step": 2, "learning_rate": 1e-3, "train_loss": 1.5, "val_loss": 1.25,
          "tokens_per_second": 3.5, "seconds": 0.5}  # fmt: skip
ODD = (
    None, True, 0, -1, 1e308, float("nan"), float("inf"), -float("inf"), 2**31, 2**63, 2**64,
    10**400, "", "x" * 5000, [], {}, [[]], [1], {"a": 1}, [{}], [None], "3", 0.5, 2**40, [2**40],
    [2**31, 2**31], [0], [-1], *NUMBERS, *TEXTS,
)  # fmt: skip


def prepare(folder: Path) -> None:
    """One run with checkpoints of two steps; every case begins from a copy of it."""
    model = ModelConfig("rnn", vocab_size=3, embedding_dim=2, hidden_dim=4)
    config = Config("x", model, training=TrainingConfig(1, 2, batch_size=2, sequence_length=4))
    run = create_run(folder / "valid", config, CharacterTokenizer("abc"))
    state = init_state(model, config.training)
    progress = Progress([Epoch(**RECORD)], [1.5], 0.5, 1.25, 1)
    with open_checkpoints(run) as manager:
        for step in (1, 2):
            save(manager, state.replace(step=jax.numpy.array(step)), state.params, progress)
    (run / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n")


def make(rng: random.Random, folder: Path) -> Made:
    place = folder / f"runs{next(COUNT)}"  # a new one a case
    for old in folder.glob("runs*"):
        shutil.rmtree(old, ignore_errors=True)
    run = Path(shutil.copytree(folder / "valid" / "x" / "v1", place / "x" / "v1"))
    newest = run / "checkpoints" / "2"
    if rng.random() < 0.6:
        shutil.rmtree(run / "checkpoints" / "1")
    rehash = rng.random() < 0.8
    for _ in range(rng.choice((1, 1, 1, 2))):
        with contextlib.suppress(Exception):  # the first may have left nothing for a second
            rng.choice(WAYS)(rng, run, newest)
    if rehash and size(newest) < 2**20:
        with contextlib.suppress(OSError):
            (newest / CHECKSUMS).unlink(missing_ok=True)
            (newest / CHECKSUMS).write_text(json.dumps(hashes(newest)))
    elif rng.random() < 0.5:
        with contextlib.suppress(OSError):
            (newest / CHECKSUMS).unlink()
    for step in (1, 2):  # what is checked must be as bad
        if rng.random() < 0.05:
            with contextlib.suppress(OSError):
                _checksums(rng, run, run / "checkpoints" / str(step))
    return Made(run, min(size(place), 2**20), place)


def size(folder: Path) -> int:
    """Of all files in a folder; a hole counts as what it seems to be."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def load(run: Path) -> None:
    """As sample.py, train.py --resume and report.py read a run; what they print is a line each."""
    from jaxgru.errors import UserError

    refused = None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for call in (lambda: _use(run), lambda: _resume(run)):
            try:
                call()
            except UserError as error:
                refused = error
    for line in said.getvalue().split("\n"):
        if not line.isprintable():
            raise Finding(f"printed what a terminal would obey: {line[:300]!r}")
        if "Traceback" in line:
            raise Finding(f"printed a traceback: {said.getvalue()[-300:]!r}")
    if refused is not None:
        raise refused


def _use(run: Path) -> None:
    params, config, tokenizer = jaxgru.lm.load(run)
    jaxgru.lm.apply(
        params, tokenizer.encode(tokenizer.decode(np.arange(tokenizer.vocab_size)))[None]
    )
    repr(config)


def _resume(run: Path) -> None:
    """What `running` does with a checkpoint before it trains: all but the training itself."""
    config = load_run_config(run)
    with open_checkpoints(run) as manager:
        state, _, progress = restore(manager, run, config)
    _ = f"{int(state.step)} {progress.epoch + 1} {progress.best_val_loss:.4f}"
    _ = sum(progress.epoch_losses) / max(1, len(progress.epoch_losses)) + progress.epoch_seconds
    _ = f"{progress.best_epoch:,} {min(progress.best_val_loss, 1.0):.4f}"
    _ = [f"{json.dumps(r.to_dict())} {r.val_loss:.4f}" for r in progress.records]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _spoilt(rng: random.Random, run: Path, newest: Path) -> None:
    """Any file of the run, its bytes spoilt."""
    path = rng.choice(_files(rng.choice((newest, newest, newest, run))))
    path.write_bytes(mutate(rng, path.read_bytes()))


def _json(rng: random.Random, run: Path, newest: Path) -> None:
    """Any file of JSON: something is missing in it or is another thing; or it is none at all."""
    path = rng.choice([p for p in _files(newest) if p.read_bytes()[:1] == b"{"])
    if rng.random() < 0.2:
        path.write_bytes(_no_json(rng))
        return
    value = json.loads(path.read_bytes())
    _change(rng, value)
    path.write_text(json.dumps(value))


def _no_json(rng: random.Random) -> bytes:
    n = rng.choice((1, 1000, 100_000))
    return rng.choice((
        b"[" * n, b'{"a":' * n, b"[" * n + b"]" * n, b'{"a":' * n + b"1" + b"}" * n, b"9" * n,
        b"null", b"[]", b"{}", b"3", b'"x"', b"", b"\0" * n, b"\xff", b'{"a": 1e999}',
        b'{"tree_metadata": ' + b'{"a":' * n + b"1" + b"}" * (n + 1),
        b'{"records": ' + b"[" * n + b"]" * n + b"}", b"\xef\xbb\xbf{}", b'{"\\ud800": "\\udfff"}',
    ))  # fmt: skip


def _change(rng: random.Random, value: Any) -> None:
    for _ in range(rng.choice((2, 4, 8))):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys or rng.random() < 0.1:
            break
        key = rng.choice(keys)
        if isinstance(value[key], (dict, list)) and rng.random() < 0.8:
            value = value[key]
            continue
        if rng.random() < 0.25:
            del value[key]
        elif rng.random() < 0.2 and isinstance(value, dict):
            value[rng.choice((text(rng), "x" * 5000, "\ud800"))] = value.pop(key)
        else:
            value[key] = rng.choice(ODD)
        return
    if isinstance(value, dict):
        value[text(rng)] = rng.choice(ODD)
    else:
        value.append(rng.choice(ODD))


def _progress(rng: random.Random, run: Path, newest: Path) -> None:
    path = newest / "progress" / "metadata"
    value = json.loads(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        value[rng.choice([*value, "extra"])] = rng.choice((*ODD, [rng.choice(ODD)], [{"epoch": 1}]))
    if rng.random() < 0.3:
        value = rng.choice(ODD)
    path.write_text(json.dumps(value))


def _odd(rng: random.Random, run: Path, newest: Path) -> None:
    """Something else in the place of a file or a folder: a pipe, a link, a device, nothing."""
    places = [run / name for name in ("metrics.jsonl", "tokenizer.json", "config.toml")]
    places += [newest, newest.parent, newest / CHECKSUMS, newest / "progress", *newest.rglob("*")]
    path = rng.choice(places)
    if rng.random() < 0.15:
        path = path / text(rng).replace("\0", "") if path.is_dir() else path.with_name(_name(rng))
    aside = run / "aside"
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    match rng.randrange(10):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/stdin", "/proc", "/")))
        case 4:
            path.symlink_to(rng.choice(("missing", "..", ".", "../..", "/etc/passwd", "/etc")))
        case 5:
            path.symlink_to(aside)
        case 6:
            path.write_bytes(b"")
        case 7:
            with path.open("wb") as file:
                file.truncate(rng.choice((2**33, 2**40)))  # a hole: it takes no room
        case 8:
            path.write_bytes(_no_json(rng))
        case 9:
            pass


def _name(rng: random.Random) -> str:
    return rng.choice((
        "3", "03", "-1", "+2", "2.0", "\u0663", "\u00b2", "9" * 18, "9" * 200, "step_3", "3_4",
        " 3", "3.tmp", "3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1", "3.broken", "\x1b[31m",
        "a\nb", "x",
        "\u202e", "best", "params", "default", "metrics", "process_1", "ocdbt.process_1", "\udcff",
        "metadata", "_CHECKPOINT_METADATA", "2", "1",
    ))  # fmt: skip


def _names(rng: random.Random, run: Path, newest: Path) -> None:
    """Files and folders more, under any name; a checkpoint under another step's."""
    place = rng.choice((newest.parent, newest.parent, newest, *newest.rglob("*")))
    path = (place if place.is_dir() else place.parent) / _name(rng)
    match rng.randrange(4):
        case 0:
            path.mkdir(exist_ok=True)
        case 1:
            path.write_bytes(b"x")
        case 2:
            shutil.copytree(newest.with_name("2"), path, ignore=lambda *_: [path.name])
        case 3:
            newest.rename(newest.parent / _name(rng))


def _checksums(rng: random.Random, run: Path, newest: Path) -> None:
    """Checksums of what is not there, not in there, no file, or of another form."""
    path = newest / CHECKSUMS
    sums = json.loads(path.read_bytes())
    name = rng.choice((
        "/dev/zero", "/dev/stdin", "../../config.toml", "../../../../../../../../etc/passwd", "..",
        ".", "", "\0", "x" * 5000, "\x1b[31m", "a\nb", "\ud800", "params", "params/../params/d",
        "//dev/zero", "/", "params/d/missing", CHECKSUMS, "~", "1/" * 5000, text(rng),
    ))  # fmt: skip
    if name == "../../config.toml" and rng.random() < 0.5:
        sums[name] = hashes(run)["config.toml"]
    elif rng.random() < 0.7:
        sums = {name: rng.choice(("0" * 64, *ODD))} | (sums if rng.random() < 0.5 else {})
    elif rng.random() < 0.5:
        sums[rng.choice(list(sums))] = rng.choice(ODD)
    else:
        path.write_bytes(_no_json(rng))
        return
    path.write_text(json.dumps(sums))


def _store(newest: Path, item: str) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"file://{newest}/{item}/"}
    return ts.KvStore.open(spec).result()


def _arrays(rng: random.Random, run: Path, newest: Path) -> None:
    """Arrays whose metadata lie, in a store that is whole; or other bytes for what they hold."""
    store = _store(newest, rng.choice(ITEMS))
    keys = store.list().result()
    about = rng.choice([key for key in keys if key.endswith(b"/.zarray")])
    name = about[: -len(b"/.zarray")]
    chunks = [key for key in keys if key.startswith(name + b"/") and key != about]
    value = json.loads(store.read(about).result().value)
    match rng.randrange(8):
        case 0 | 1:
            _change(rng, value)
        case 2:
            size = rng.choice((2**14, 2**20, 2**31, 2**40, 2**62, 0, -1))
            value["chunks"] = [size] * len(value["shape"])
            if rng.random() < 0.5:
                value["shape"] = value["chunks"]
        case 3:
            value["chunks"] = [2**13] * len(value["shape"])
            parts = 2 ** max(0, 13 * len(value["shape"]) - 15)
            store.write(chunks[0], zstd_zeros(min(parts, 2**13))).result()
        case 4:
            value["dtype"] = rng.choice(("<f8", "<i8", "|S1", "|S999999999", "<c16", "|b1", "|V9"))
        case 5:
            store.delete_range(ts.KvStore.KeyRange(name + b"/0", name + b"/9")).result()
            value["fill_value"] = rng.choice((0, 1, None, "NaN", 1e999))
        case 6:
            data = store.read(chunks[0]).result().value
            store.write(chunks[0], rng.choice((b"", zstd_zeros(8), mutate(rng, data)))).result()
        case 7:
            if rng.random() < 0.5:
                store.write(about, _no_json(rng)).result()
            else:
                store.delete_range(ts.KvStore.KeyRange(about, about + b"0")).result()
            return
    store.write(about, json.dumps(value)).result()


def zstd_zeros(blocks: int) -> bytes:
    """Zstandard (RFC 8878) of `blocks` times 128 KiB of zeros, 4 bytes each."""
    part = [
        struct.pack("<I", (2**17 << 3) | (1 << 1) | (i == blocks - 1))[:3] + b"\0"
        for i in range(blocks)
    ]
    return struct.pack("<IBB", 0xFD2FB528, 0, 0x38) + b"".join(part)


def _tree(rng: random.Random, run: Path, newest: Path) -> None:
    """The flags and the tree of an item's _METADATA: which driver, which arrays, of which type."""
    path = newest / rng.choice(ITEMS) / "_METADATA"
    value = json.loads(path.read_bytes())
    tree = value["tree_metadata"]
    name = rng.choice(list(tree))
    match rng.randrange(7):
        case 0:
            flags = ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
            value[rng.choice(flags)] = rng.choice((True, False, None, "x", 3, []))
        case 1:
            tree[name]["value_metadata"]["value_type"] = rng.choice((
                "np.ndarray", "scalar", "string", "None", "Dict", "List", "x", text(rng), "Tuple",
                "NamedTuple", "jax.Array", "jax.random.key", None, 3,
            ))  # fmt: skip
        case 2:
            tree[name]["key_metadata"] = rng.choice((
                [], [{"key": "a", "key_type": 2}, {"key": "b", "key_type": 2}],
                [{"key": "0", "key_type": 1}], [{"key": "a", "key_type": 9}],
                [{"key": rng.choice(("..", "/dev/zero", "../x", "", "\0", text(rng))),
                  "key_type": 2}], [{"key": "a", "key_type": 2}] * 500,
            ))  # fmt: skip
        case 3:
            del tree[name]
        case 4:
            tree[f"('{text(rng)}',)"] = tree[name]
        case 5:
            for i in range(rng.choice((10, 1000))):
                tree[f"('x{i}',)"] = {
                    "key_metadata": [{"key": f"x{i}", "key_type": 2}],
                    "value_metadata": tree[name]["value_metadata"],
                }
        case 6:
            tree[name]["value_metadata"]["write_shape"] = rng.choice(
                ([2**40], [2**31, 2**31], [-1], [0], [], None, "x", [10**400], [1] * 1000)
            )
    path.write_text(json.dumps(value))


def _database(rng: random.Random, run: Path, newest: Path) -> None:
    """OCDBT's own files, spoilt where their check sum agrees: its nodes are not compressed here."""
    folder = newest / rng.choice(ITEMS)
    store = _store(newest, folder.name)
    values = {key: store.read(key).result().value for key in store.list().result()}
    plain = folder.with_name("plain")
    target = ts.KvStore.open({
        "driver": "ocdbt", "base": f"file://{plain}/",
        "config": {"compression": None, "max_inline_value_bytes": rng.choice((0, 1024))},
    }).result()  # fmt: skip
    with ts.Transaction() as transaction:
        for key, value in values.items():
            target.with_transaction(transaction).write(key, value).result()
    for name in ("d", "manifest.ocdbt"):
        old, new = folder / name, plain / name
        shutil.rmtree(old) if old.is_dir() else old.unlink()
        new.rename(old)
    plain.rmdir()
    path = rng.choice((folder / "manifest.ocdbt", *(folder / "d").iterdir()))
    data = path.read_bytes()
    if path.parent == folder:
        path.write_bytes(_sealed(mutate(rng, data)))
        return
    # a data file is of values and nodes, one after another; each node begins with its magic number
    at = data.rfind(bytes.fromhex("0cdb20de"))
    if at >= 0 and rng.random() < 0.8:
        node = data[at : at + struct.unpack("<Q", data[at + 4 : at + 12])[0]]
        data = data[:at] + _sealed(mutate(rng, node), len(node)) + data[at + len(node) :]
    else:
        data = mutate(rng, data)
    path.write_bytes(data)


def _sealed(data: bytes, length: int | None = None) -> bytes:
    """A manifest or a node with the length and the CRC-32C that it should have."""
    data = data[:-4].ljust(12, b"\0")
    if length is not None:  # its place is in its parent, so that its length has to stay
        data = data[: length - 4].ljust(length - 4, b"\0")
    data = data[:4] + struct.pack("<Q", len(data) + 4) + data[12:]
    return data + struct.pack("<I", crc32c(data))


def crc32c(data: bytes) -> int:
    """Castagnoli's cyclic redundancy check, bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _config(rng: random.Random, run: Path, newest: Path) -> None:
    """A config of other sizes; sometimes the arrays say so, too."""
    path = run / "config.toml"
    field = rng.choice(("hidden_dim", "embedding_dim", "vocab_size", "num_layers"))
    size = rng.choice((1, 5, 100, 2**20, 2**31, 2**40, 2**62))
    old = {"hidden_dim": 4, "embedding_dim": 2, "vocab_size": 3, "num_layers": 1}[field]
    path.write_text(path.read_text().replace(f"{field} = {old}\n", f"{field} = {size}\n"))
    if field == "num_layers":
        return
    for item in ITEMS:
        store = _store(newest, item)
        for key in store.list().result():
            if key.endswith(b"/.zarray"):
                value = json.loads(store.read(key).result().value)
                value["shape"] = [size if n == old else n for n in value["shape"]]
                value["fill_value"] = 0
                store.write(key, json.dumps(value)).result()
        if rng.random() < 0.7:
            about = newest / item / "_METADATA"
            about.write_text(about.read_text().replace(
                '"store_array_data_equal_to_fill_value": true',
                '"store_array_data_equal_to_fill_value": false'))  # fmt: skip


WAYS: tuple[Callable[[random.Random, Path, Path], None], ...] = (
    _spoilt, _spoilt, _json, _json, _progress, _odd, _odd, _names, _checksums, _arrays, _arrays,
    _tree, _database, _config,
)  # fmt: skip
