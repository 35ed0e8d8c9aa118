"""Run folders: counted, linked, found, held by one at a time, and the commit they name."""

import errno
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import contents

from jaxgru.errors import UserError
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.runs import folders
from jaxgru.lm.runs.folders import RunError, RunInfo, create_run, find_run, load_info, lock_run

CONFIG = Config("tiny")
TOKENIZER = CharacterTokenizer("abc")


def make_run(root):
    """A run with something in the place of a checkpoint, of step 2."""
    run = create_run(root, CONFIG, TOKENIZER)
    (run / "checkpoints" / "2").mkdir(parents=True)
    (run / "checkpoints" / "2" / "checksums.json").write_text("{}")
    (run / folders.LOCK).touch()  # as whoever trained it has left it
    return run


def test_versions_count_up_and_latest_follows(tmp_path):
    runs = [create_run(tmp_path, CONFIG, TOKENIZER) for _ in range(3)]
    assert [run.name for run in runs] == ["v1", "v2", "v3"]
    assert find_run(tmp_path / "tiny") == runs[2].resolve()
    assert find_run(runs[0]) == runs[0].resolve()
    assert os.readlink(tmp_path / "tiny" / "latest") == "v3"
    runs[0].rename(tmp_path / "tiny" / "v10")
    assert create_run(tmp_path, CONFIG, TOKENIZER).name == "v11"


@pytest.mark.parametrize("linked", ["runs", "runs/tiny", "runs/tiny/v1"])
def test_runs_may_lie_on_another_disk_behind_a_link(tmp_path, linked):
    """They are found, counted and cleared there; by either name, one process holds a run."""
    link = tmp_path / linked
    disk = tmp_path / "large disk"
    run = create_run(tmp_path / "runs", CONFIG, TOKENIZER)
    link.rename(disk)
    link.symlink_to(disk)
    real = find_run(tmp_path / "runs" / "tiny")
    assert real == run.resolve() and real.is_relative_to(disk)
    (real / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    with lock_run(run):
        assert list((real / "checkpoints").iterdir()) == []
        with pytest.raises(RunError, match="is being trained by another process"):
            with lock_run(real):
                raise AssertionError("two hold it")
    second = create_run(tmp_path / "runs", CONFIG, TOKENIZER)
    assert second.name == "v2" and find_run(tmp_path / "runs" / "tiny") == second.resolve()
    assert link.is_symlink()


@pytest.mark.parametrize("linked", ["runs", "runs/tiny"])
@pytest.mark.parametrize("to", ["unmounted", "itself"])
def test_a_link_to_nothing_is_refused(tmp_path, linked, to):
    link = tmp_path / linked
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(link if to == "itself" else tmp_path / to)
    says = f"{link} is a link to .*, which is not there; mount|Too many levels of symbolic links"
    with pytest.raises(RunError, match=says):
        create_run(tmp_path / "runs", CONFIG, TOKENIZER)
    assert link.is_symlink()


def test_what_is_no_run(tmp_path):
    """A name longer than 255 bytes is the fuzzer's find."""
    for path in (tmp_path, __file__, "x" * 300):
        with pytest.raises(RunError, match="there is no run in"):
            find_run(path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        create_run(tmp_path / "file", CONFIG, TOKENIZER)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_damaged_run_json_is_refused(tmp_path):
    info = RunInfo("12", "34", 5)
    run = create_run(tmp_path, CONFIG, TOKENIZER, info)
    assert load_info(run) == info
    for data in (b"", b"[]", b"\xff", b'{"text": ""}', b'{"lengthened": "1"}', b'{"commits": 1}'):
        (run / "run.json").write_bytes(data)
        with pytest.raises(RunError, match="json cannot be read"):
            load_info(run)
    (run / "run.json").unlink()
    with pytest.raises(RunError, match="json cannot be read"):
        load_info(run)


def test_what_a_killed_process_left_half_is_removed_and_nothing_else(tmp_path):
    """By one process at a time, which holds the run."""
    run = make_run(tmp_path)
    before = contents(run)
    half = run / "checkpoints" / "4.orbax-checkpoint-tmp" / "params"
    half.mkdir(parents=True)
    (half / "d").write_bytes(b"half")
    for _ in range(2):
        with lock_run(run):
            assert contents(run) == before
            with pytest.raises(RunError, match=f"{run} is being trained by another process"):
                with lock_run(run):
                    raise AssertionError("two hold it")


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("OUT_OF_RANGE: Failed writing: No space left on device [os_error_code='28']"),
])  # fmt: skip
def test_a_full_disk_is_one_sentence_that_names_what_is_intact(tmp_path, error):
    """Also where Orbax has words of its own for it."""
    run = make_run(tmp_path)
    of_orbax = RuntimeError("Orbax's own words")
    of_orbax.__cause__ = error
    for raised in (error, of_orbax):
        says = "No space left on device; the checkpoint of step 2 is intact"
        with pytest.raises(RunError, match=says), lock_run(run):
            raise raised


def test_no_damaged_or_deleted_checkpoint_is_called_intact(tmp_path):
    run = make_run(tmp_path)
    (run / "checkpoints" / "4").mkdir()
    (run / "checkpoints" / "4" / "checksums.json").write_text('{"params": "0"}')
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunError, match="the checkpoint of step 2 is intact"), lock_run(run):
        raise full
    says = "was moved or deleted while it was trained; if it was moved, it can be resumed"
    with pytest.raises(RunError, match=says), lock_run(run):
        shutil.rmtree(run)
        raise full


@pytest.mark.parametrize("error", [UserError("Permission denied"), ValueError("a bug")])
def test_other_errors_pass_as_they_are(tmp_path, error):
    run = make_run(tmp_path)
    with pytest.raises(type(error)) as raised, lock_run(run):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("name", ["save_tokenizer", "save_config", "_point"])
def test_a_start_that_fails_leaves_nothing(tmp_path, monkeypatch, name):
    """Wherever the disk fails, and also beside a run that is there."""

    def fail(*_):
        monkeypatch.undo()
        raise OSError(errno.ESTALE, "Stale file handle")

    for _ in range(2):
        before = contents(tmp_path)
        monkeypatch.setattr(folders, name, fail)
        with pytest.raises(RunError, match="Stale file handle"):
            create_run(tmp_path, CONFIG, TOKENIZER)
        assert contents(tmp_path) == before
        create_run(tmp_path, CONFIG, TOKENIZER)
    assert sorted(os.listdir(tmp_path / "tiny")) == ["latest", "v1", "v2"]


def test_many_starts_at_once(tmp_path):
    """Every other one is discarded. None fails, and `latest` is the newest that stays."""

    def start(number):
        run = create_run(tmp_path, CONFIG, TOKENIZER)
        return None if number % 2 and folders.discard_empty(run) else run

    with ThreadPoolExecutor(8) as pool:
        runs = sorted(filter(None, pool.map(start, range(41))), key=lambda run: int(run.name[1:]))
    assert len(set(runs)) == 21 and find_run(tmp_path / "tiny") == runs[-1].resolve()
    assert os.readlink(tmp_path / "tiny" / "latest") == runs[-1].name
    for run in runs:
        assert folders.discard_empty(run)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_a_run_in_the_place_of_its_link(tmp_path):
    """As `zip -r` leaves it; what is in it stays."""
    run = create_run(tmp_path, CONFIG, TOKENIZER)
    latest = run.parent / "latest"
    latest.unlink()
    shutil.copytree(run, latest)
    before = contents(latest)
    with pytest.raises(RunError, match=r"cannot be written: Is a directory \(latest\)"):
        create_run(tmp_path, CONFIG, TOKENIZER)
    assert contents(latest) == before and find_run(run.parent) == run.resolve()


def test_a_checkout_is_named_by_its_commit(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    (root / "jaxgru").mkdir(parents=True)
    (root / "jaxgru" / "file").write_text("1")
    monkeypatch.setattr(folders, "ROOT", root)

    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
    assert folders.current_commit() == head
    (root / "jaxgru" / "file").write_text("2")
    assert folders.current_commit() == head + "-dirty"
    monkeypatch.setattr(folders, "ROOT", root / "jaxgru")  # as site-packages in a venv
    assert folders.current_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert folders.current_commit() is None
