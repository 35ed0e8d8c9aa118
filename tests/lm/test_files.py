"""Files are written whole or not at all."""

from __future__ import annotations

import fcntl
import os

import pytest

from jaxgru.files import hashes, locked, write_bytes, write_text


def test_bytes_and_text_arrive_as_they_are(tmp_path):
    write_bytes(tmp_path / "bytes", b"\x00\xff\r\n")
    write_text(tmp_path / "text", "é\r\nλ\n")
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff\r\n"
    assert (tmp_path / "text").read_bytes() == "é\r\nλ\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text"]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_says_who_may_read_it(tmp_path, mask, mode):
    """POSIX, open: 0666 without the umask's bits; also where there was a file before."""
    before = os.umask(mask)
    try:
        for _ in range(2):
            write_bytes(tmp_path / "file", b"x")
            assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_halfway_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error):
    def fail(*args):
        raise error

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_missing_and_one_in_the_files_place(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_bytes(tmp_path / "missing" / "file", b"x")
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write_bytes(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_two_write_one_file_and_the_last_one_wins(tmp_path, monkeypatch):
    """The second one begins and ends while the first one writes."""
    path = tmp_path / "file"
    fsync = os.fsync

    def during_the_first(handle):
        monkeypatch.setattr(os, "fsync", fsync)
        write_bytes(path, b"second")
        assert path.read_bytes() == b"second"
        fsync(handle)

    monkeypatch.setattr(os, "fsync", during_the_first)
    write_bytes(path, b"first")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_a_lock_is_held_once_and_leaves_no_trace(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"data")
    with locked(path) as ours:
        for _ in range(2):  # whoever was refused has not let go of it
            with locked(path) as theirs:
                assert (ours, theirs) == (True, False)
    with locked(path) as ours:
        assert ours
    assert path.read_bytes() == b"data" and os.listdir(tmp_path) == ["file"]


def test_where_there_are_no_locks_every_process_gets_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with locked(tmp_path / "file") as ours, locked(tmp_path / "file") as theirs:
        assert ours and theirs


def test_hashes_of_the_files_below_a_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_text(tmp_path / "a" / "b" / "abc", "abc")
    write_text(tmp_path / "empty", "")
    assert hashes(tmp_path) == {  # FIPS 180-2, appendix B.1; and of no bytes
        "a/b/abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "empty": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
