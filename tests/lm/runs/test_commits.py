"""The commit that trains a run: read from git, and kept in run.json."""

import shutil
import subprocess

import pytest

from jaxgru.lm.runs import commits, lifecycle
from jaxgru.lm.runs.commits import current_commit
from jaxgru.lm.runs.folders import load_info

A = "a" * 40


def test_a_checkout_is_named_by_its_commit(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    (root / "jaxgru").mkdir(parents=True)
    (root / "jaxgru" / "file").write_text("1")
    monkeypatch.setattr(commits, "ROOT", root)

    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
    assert current_commit() == head
    (root / "jaxgru" / "file").write_text("2")
    assert current_commit() == head + "-dirty"
    monkeypatch.setattr(commits, "ROOT", root / "jaxgru")  # as site-packages in a venv
    assert current_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert current_commit() is None


def test_a_run_names_each_commit_that_trained_it(run_copy, monkeypatch):
    first = load_info(run_copy).commits
    assert first == [current_commit()] * len(first)
    monkeypatch.setattr(lifecycle, "current_commit", lambda: A)
    lifecycle.resume_run(run_copy)  # it is finished: nothing is trained
    assert load_info(run_copy).commits == first
    lifecycle.resume_run(run_copy, {"training.epochs": 4})
    assert load_info(run_copy).commits == [*first, A]
