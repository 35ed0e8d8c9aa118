"""A checkpoint may come from anywhere: it is read, or refused in one printable line, at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from conftest import slow

import jaxgru
from jaxgru.errors import UserError
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import TrainingConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer, load_tokenizer
from jaxgru.lm.files import hashes
from jaxgru.lm.runs.checkpoints import restore, save
from jaxgru.lm.runs.folders import RunError, create_run, load_info, load_run_config
from jaxgru.lm.runs.orbax import CHECKSUMS, open_checkpoints
from jaxgru.lm.training import Epoch, Progress, TrainState, init_state

MODEL = ModelConfig("rnn", vocab_size=3, embedding_dim=2, hidden_dim=4)
RECORD = {"epoch": 1, "step": 2, "learning_rate": 1e-3, "train_loss": 1.5, "val_loss": 1.25,
          "tokens_per_second": 3.5, "seconds": 0.5}  # fmt: skip
NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
JSON_FILES = (CHECKSUMS, "_CHECKPOINT_METADATA", "params/_METADATA", "params/_sharding",
              "progress/metadata")  # fmt: skip


@pytest.fixture(autouse=True)
def in_time():
    """What waits for a pipe or reads a device does so for ever."""

    def over(*_):
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture(scope="module")
def state() -> TrainState:
    """What is saved."""
    return init_state(MODEL, TrainingConfig())


@pytest.fixture(scope="module")
def made(tmp_path_factory, state) -> Path:
    """A run with whole checkpoints of steps 1 and 2."""
    config = Config("x", MODEL, training=TrainingConfig(1, 2, batch_size=2, sequence_length=4))
    run = create_run(tmp_path_factory.mktemp("made"), config, CharacterTokenizer("abc"))
    with open_checkpoints(run) as manager:
        for step in (1, 2):
            progress = Progress([Epoch(**RECORD)], [1.5], 0.5, 1.25, 1)
            save(manager, state.replace(step=jax.numpy.array(step)), state.params, progress)
    return run


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of it to spoil, whose only checkpoint is the newest."""
    run = Path(shutil.copytree(made, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "1")
    return run


@pytest.fixture
def newest(run) -> Path:
    return run / "checkpoints" / "2"


def resume(run: Path) -> None:
    with open_checkpoints(run) as manager:
        restore(manager, run, load_run_config(run))


def refusal(call, *arguments) -> str:
    """The one printable line that a call is refused with."""
    with pytest.raises(UserError) as refused:
        call(*arguments)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 2000
    return str(refused.value)


def seal(newest: Path) -> None:
    """Checksums that agree: whoever forges a checkpoint forges them, too."""
    (newest / CHECKSUMS).unlink()
    (newest / CHECKSUMS).write_text(json.dumps(hashes(newest)))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def change_array(newest: Path, item: str, name: str, chunk: bytes | None = None, **values) -> None:
    """Other metadata, or another first chunk, for a stored array."""
    tensorstore = pytest.importorskip("tensorstore")
    base = f"file://{newest}/{item}/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    about = json.loads(store.read(f"{name}/.zarray").result().value) | values
    store.write(f"{name}/.zarray", json.dumps(about)).result()
    if chunk is not None:
        first = ".".join("0" * len(about["shape"]))
        store.write(f"{name}/{first}", chunk).result()
    seal(newest)


def zstd_zeros(num_bytes: int) -> bytes:
    """Zstandard (RFC 8878): 4 bytes for each block of 128 KiB of zeros."""
    count = num_bytes // 2**17
    headers = [(2**17 << 3) | (1 << 1) | (i == count - 1) for i in range(count)]
    blocks = [struct.pack("<I", header)[:3] + b"\0" for header in headers]
    return struct.pack("<IBB", 0xFD2FB528, 0, 0x38) + b"".join(blocks)


class TestChecksums:
    @pytest.mark.parametrize(
        "name",
        ["/dev/zero", "/etc/passwd", "../../config.toml", "params/../params/_METADATA", "params",
         "\x1b[31m", "a\nb", "\0", "\ud800", "x" * 5000, ""],
    )  # fmt: skip
    @pytest.mark.parametrize("call", [jaxgru.lm.load, *slow(resume)])
    def test_only_what_is_in_the_folder_is_hashed(self, run, newest, name, call):
        """Not even with the right hash; and the name is printed as text."""
        right = hashes(run).get("config.toml")
        (newest / CHECKSUMS).write_text(json.dumps({name: right}))
        assert "is missing" in refusal(call, run)

    @pytest.mark.parametrize("text", [b"[1]", b"null", b"\xff", b"", NESTED, b"9" * 5000])
    def test_of_another_form(self, run, newest, text):
        (newest / CHECKSUMS).write_bytes(text)
        assert f"{CHECKSUMS} differs from what was written" in refusal(jaxgru.lm.load, run)


class TestFiles:
    @pytest.mark.parametrize("call", [jaxgru.lm.load, *slow(resume)])
    @pytest.mark.parametrize("kind", ["pipe", "device", "link outside", "loop", "hole"])
    @pytest.mark.parametrize("name", [*JSON_FILES, "params/manifest.ocdbt", "extra"])
    def test_what_is_no_file_is_not_opened(self, run, newest, name, kind, call):
        path = newest / name
        if path.exists():
            path.rename(run / "aside")
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to("/dev/zero")
            case "link outside":
                path.symlink_to(run / "config.toml")
            case "loop":
                path.symlink_to(path.name)
            case "hole":
                with path.open("wb") as file:
                    file.truncate(2**40)
        says = refusal(call, run)
        if kind == "hole":
            assert "it has 1,099,511," in says
        else:
            assert f"{name} is a link, a pipe or a device" in says

    @pytest.mark.parametrize("name", JSON_FILES)
    def test_metadata_larger_than_any(self, run, newest, name):
        with (newest / name).open("r+b") as file:
            file.truncate(2**27)
        assert f"{name} has 134,217,728 bytes; at most 67,108,864" in refusal(jaxgru.lm.load, run)

    def test_a_checkpoint_that_is_a_link(self, run, newest):
        newest.symlink_to(newest.rename(run / "aside"))
        assert "2: it is a link" in refusal(jaxgru.lm.load, run)

    @pytest.mark.parametrize("name", JSON_FILES[1:])
    @pytest.mark.parametrize("text", [NESTED, b"[]", *slow(b'"x"', b"\xff", b"9" * 5000)])
    def test_json_that_is_something_else(self, run, newest, name, text, capfd):
        """Some of them say nothing about the arrays: then the arrays are right."""
        (newest / name).write_bytes(text)
        seal(newest)
        for call in (jaxgru.lm.load, resume):
            try:
                call(run)
            except RunError as error:
                assert str(newest) in str(error) and str(error).isprintable()
        assert capfd.readouterr().err == ""

    def test_one_spoilt_checkpoint_costs_no_other(self, made, tmp_path, capfd):
        """A pipe in the newest: the one before is used, and the newest set aside."""
        run = Path(shutil.copytree(made, tmp_path / "a\x1b[31m\nb"))
        newest = run / "checkpoints" / "2"
        (newest / "_CHECKPOINT_METADATA").unlink()
        os.mkfifo(newest / "_CHECKPOINT_METADATA")
        jaxgru.lm.load(run)
        resume(run)
        assert sorted(os.listdir(newest.parent)) == ["1", "2.broken"]
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 2 and all(line.isprintable() for line in said)
        assert r"a\x1b[31m\nb" in said[0] and "that of step 1 is used" in said[0]


class TestFolders:
    @pytest.mark.parametrize("name", ["\u00b2", "\u0663", "03", "-1", "\x1b[31m", "3.tmp", "x"])
    def test_folders_that_are_no_checkpoints(self, run, name):
        """`str.isdigit` takes other digits, too; and a number may be written in several ways."""
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / "4").write_text("")
        jaxgru.lm.load(run)
        resume(run)
        assert sorted(os.listdir(run / "checkpoints")) == sorted(["2", "4", name])

    @pytest.mark.parametrize("kind", ["pipe", "file", "loop"])
    def test_something_else_in_their_place(self, run, kind):
        path = run / "checkpoints"
        shutil.rmtree(path)
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "file":
                path.write_text("")
            case "loop":
                path.symlink_to("checkpoints")
        assert "checkpoints cannot be read: " in refusal(jaxgru.lm.load, run)
        assert "checkpoints should be a folder" in refusal(resume, run)

    def test_a_folder_that_may_not_be_read(self, run, monkeypatch):
        """Mode 000; root may read everything, so that the call's error is simulated."""
        listdir = os.listdir

        def refuse(path="."):
            if Path(path) == run / "checkpoints":
                raise PermissionError(13, "Permission denied", str(path))
            return listdir(path)

        monkeypatch.setattr(os, "listdir", refuse)
        says = refusal(jaxgru.lm.load, run)
        assert says == f"{run / 'checkpoints'} cannot be read: Permission denied."


class TestArrays:
    @pytest.mark.parametrize("item", ["params", "optimizer"])
    def test_chunks_larger_than_their_array(self, run, newest, item):
        """A gigabyte was taken for 6 numbers, from 32 KiB on disk."""
        name = "embedding" if item == "params" else "opt_state.1.0.mu.embedding"
        change_array(newest, item, name, zstd_zeros(2**30), chunks=[2**14, 2**14])
        call = jaxgru.lm.load if item == "params" else resume
        says = refusal(call, run)
        assert f"{name} is stored in parts of (16384, 16384), more than its shape (3, 2)" in says

    @pytest.mark.parametrize("size", [2**20, 2**25])
    def test_arrays_larger_than_their_files(self, run, newest, size):
        """Chunks that are not stored count as zeros: a GB; or 30 MB, but 2 GB while it is read."""
        config = run / "config.toml"
        config.write_text(
            config.read_text().replace("embedding_dim = 2\n", f"embedding_dim = {size}\n")
        )
        change_array(newest, "params", "embedding", shape=[3, size], fill_value=0)
        change_array(newest, "params", "layers.0.W", shape=[size, 4], fill_value=0)
        change_json(newest / "params" / "_METADATA", store_array_data_equal_to_fill_value=False)
        seal(newest)
        num_bytes = 4 * ((3 + 4) * size + 4 * 4 + 4 + 4 * 3 + 3)  # embedding, W; U, b, Wo, bo
        num_parts = size // 2 * 2 + 4  # of (3, 2) and of (2, 4); one of each other
        says = refusal(jaxgru.lm.load, run)
        assert f"have {num_bytes:,} bytes in {num_parts:,} parts, the files " in says

    @pytest.mark.parametrize("dtype", ["<c8", "|b1", "|S9", "|V4"])
    def test_what_is_no_number(self, run, newest, dtype):
        change_array(newest, "params", "embedding", dtype=dtype)
        says = refusal(jaxgru.lm.load, run)
        assert "embedding is " in says or "is broken and cannot be read" in says

    @pytest.mark.parametrize("chunk", [b"", b"x" * 100, zstd_zeros(2**20)])
    def test_chunks_that_are_none(self, run, newest, chunk, capfd):
        """Orbax raises a bare Exception; and the arrays read with it said so on the terminal."""
        for name in ("embedding", "head.Wo", "layers.0.W"):
            change_array(newest, "params", name, chunk)
        for call in (jaxgru.lm.load, resume):
            assert f"checkpoint {newest} is broken and cannot be read" in refusal(call, run)
        jax.clear_caches()
        assert capfd.readouterr().err == ""

    def test_memory_that_is_not_there_is_no_fault_of_a_checkpoint(self, run, monkeypatch):
        """Nor is an older checkpoint taken then."""

        def zeros(*_, **__):
            raise MemoryError

        with monkeypatch.context() as patch, pytest.raises(Exception) as raised:
            patch.setattr(np, "zeros", zeros)
            jaxgru.lm.load(run)
        assert not isinstance(raised.value, UserError)
        jaxgru.lm.load(run)


class TestProgress:
    @pytest.mark.parametrize(
        "values",
        [{"records": [1]}, {"records": [RECORD | {"val_loss": "x"}]}, {"epoch_losses": {}},
         {"epoch_losses": [float("nan")]}, {"best_epoch": 2}, {"another": 1},
         *slow({"epoch_losses": [10**400]}, {"epoch_seconds": None}, {"best_val_loss": "0"},
               {"finished": "no"}, {"records": 3}, {"records": {}}, {"records": [{"epoch": 1}]},
               {"records": [RECORD | {"step": 10**400}]}, {"epoch_losses": ["x"]},
               {"epoch_losses": [float("-inf")]}, {"epoch_losses": [True]},
               {"epoch_seconds": float("nan")}, {"epoch_seconds": -1.0},
               {"best_val_loss": float("nan")}, {"best_epoch": 1.0}, {"best_epoch": -1},
               {"finished": 0})],
    )  # fmt: skip
    def test_that_no_run_has_written(self, run, newest, values):
        change_json(newest / "progress" / "metadata", **values)
        seal(newest)
        assert "is broken and cannot be read" in refusal(resume, run)
        jaxgru.lm.load(run)  # which reads none of it

    def test_that_a_run_may_have_written(self, run, newest):
        """Before its first epoch is done, the best loss is infinite."""
        values = {"records": [], "best_val_loss": float("inf"), "best_epoch": 0}
        change_json(newest / "progress" / "metadata", **values)
        seal(newest)
        with open_checkpoints(run) as manager:
            _, _, progress = restore(manager, run, load_run_config(run))
        assert progress == Progress([], [1.5], 0.5)


@pytest.mark.parametrize("kind", ["pipe", "device", "hole"])
@pytest.mark.parametrize(
    "name, call",
    [
        ("config.toml", jaxgru.lm.load),
        ("run.json", load_info),
        ("tokenizer.json", jaxgru.lm.load),
        ("tokenizer.json", load_tokenizer),
    ],
)
def test_the_other_files_of_a_run(run, name, call, kind):
    path = run / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "hole":
            with path.open("wb") as file:
                file.truncate(2**40)
    says = refusal(call, run)
    if kind == "hole":
        assert f"{name} cannot be read: it has 1,099,511,627,776 bytes; at most " in says


def test_a_whole_checkpoint_is_what_was_saved(run, state):
    params, _, _ = jaxgru.lm.load(run)
    chex.assert_trees_all_equal(params, state.params)
