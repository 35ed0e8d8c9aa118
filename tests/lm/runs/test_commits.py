"""The commit that trains a run: read from git, and recorded with its checkpoints."""

import os
import shutil
import subprocess

import pytest

from jaxgru.lm.runs import commits, lifecycle
from jaxgru.lm.runs.commits import FILE_NAME, current_commit, record_commit

A, B = "a" * 40, "b" * 40 + "-dirty"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit of jaxgru/ and configs/; a function that runs git in it."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    for folder in ("jaxgru", "configs", "docs"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").write_text("1")
    monkeypatch.setattr(commits, "ROOT", root)

    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    return git


def test_a_checkout_is_named_by_its_commit(checkout, monkeypatch, tmp_path):
    head = checkout("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
    assert current_commit() == head
    (commits.ROOT / "docs" / "file").write_text("2")
    assert current_commit() == head


@pytest.mark.parametrize("name", ["jaxgru/file", "configs/file", "jaxgru/new"])
def test_changes_to_what_trains_are_said(checkout, name):
    (commits.ROOT / name).write_text("2")
    assert current_commit() == checkout("rev-parse", "HEAD") + "-dirty"


def test_the_repository_of_another_project_is_not_ours(checkout, monkeypatch):
    monkeypatch.setattr(commits, "ROOT", commits.ROOT / "jaxgru")  # as site-packages in a venv
    assert current_commit() is None


def test_without_a_checkout_or_git_there_is_none(checkout, monkeypatch, tmp_path):
    def hangs(*_, **options):
        raise subprocess.TimeoutExpired("git", options["timeout"])

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", hangs)
        assert current_commit() is None
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert current_commit() is None
    shutil.rmtree(commits.ROOT / ".git")
    assert current_commit() is None


def test_each_commit_is_recorded_once_in_order(tmp_path):
    record_commit(tmp_path, None, 0)
    assert os.listdir(tmp_path) == []
    for commit, step in [(A, 0), (A, 0), (B, 3), (B, 3), (None, 5), (None, 6), (A, 9)]:
        record_commit(tmp_path, commit, step)
    assert commits.trained_by(tmp_path) == [A, B, "unknown", A]
    assert (tmp_path / FILE_NAME).read_text() == (
        f"{A} from step 0\n{B} from step 3\nunknown from step 5\n{A} from step 9\n"
    )


def test_a_file_of_something_else_names_none(tmp_path):
    for data in (b"", b"\xff", b"abc from step 1\n", f"{A}\n".encode(), bytes(2**20 + 1)):
        (tmp_path / FILE_NAME).write_bytes(data)
        assert commits.trained_by(tmp_path) == []


@pytest.mark.slow
def test_a_run_resumed_by_another_commit_names_both(run_copy, monkeypatch):
    (run_copy / FILE_NAME).unlink(missing_ok=True)
    record_commit(run_copy, A, 0)
    monkeypatch.setattr(lifecycle, "current_commit", lambda: B)
    lifecycle.resume_run(run_copy)  # it is finished: nothing is trained
    assert commits.trained_by(run_copy) == [A]
    lifecycle.resume_run(run_copy, {"training.epochs": 3})
    assert (run_copy / FILE_NAME).read_text() == f"{A} from step 0\n{B} from step 6\n"
    assert commits.trained_by(run_copy) == [A, B]
