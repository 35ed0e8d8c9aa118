"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxgru.lm import files
from jaxgru.lm.files import (
    check_writable,
    files_below,
    hashes,
    locked,
    read_bytes,
    write_bytes,
    write_text,
)


def test_bytes_and_text_arrive_as_they_are(tmp_path):
    write_bytes(tmp_path / "bytes", b"\x00\xff\r\n")
    write_text(tmp_path / "text", "é\r\nλ\n")
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff\r\n"
    assert (tmp_path / "text").read_bytes() == "é\r\nλ\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text"]


def test_an_older_file_is_replaced_and_whoever_reads_it_keeps_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    with open(path, "rb") as reader:
        write_bytes(path, b"new")
        assert reader.read() == b"old and longer"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
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
def test_a_failure_halfway_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    def fail(*args):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupt_halfway_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_bytes(tmp_path / "missing" / "file", b"x")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_files_place_stays(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write_bytes(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_hashes_name_every_file_and_change_with_every_byte(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_text(tmp_path / "a" / "b" / "abc", "abc")
    write_text(tmp_path / "empty", "")
    before = hashes(tmp_path)
    assert before == {  # FIPS 180-2, appendix B.1; and of no bytes
        "a/b/abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "empty": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    write_text(tmp_path / "empty", "\0")
    assert hashes(tmp_path)["empty"] != before["empty"]


@pytest.fixture
def abandoned(tmp_path, monkeypatch):
    """What a process leaves that is killed at its last moment, neither renamed nor tidied up."""

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(os, "unlink", lambda _: None)
        with pytest.raises(Killed):
            write_bytes(tmp_path / "file", b"new")
    [part] = tmp_path.iterdir()
    return part


def test_what_a_killed_process_left_is_removed_by_the_next_write_in_that_folder(
    tmp_path, abandoned
):
    assert abandoned.read_bytes() == b"new"
    write_bytes(tmp_path / "other", b"whole")
    assert os.listdir(tmp_path) == ["other"]


def test_without_locks_nobody_can_tell_so_it_stays(tmp_path, monkeypatch, abandoned):
    monkeypatch.setattr(files, "fcntl", None)
    write_bytes(tmp_path / "other", b"whole")
    assert sorted(os.listdir(tmp_path)) == [abandoned.name, "other"]


def test_two_write_one_file_and_the_last_one_wins(tmp_path, monkeypatch):
    """The second one begins and ends while the first one writes."""
    path, fsync = tmp_path / "file", os.fsync

    def during_the_first(handle):
        monkeypatch.setattr(os, "fsync", fsync)
        write_bytes(path, b"second")
        assert path.read_bytes() == b"second"
        fsync(handle)

    monkeypatch.setattr(os, "fsync", during_the_first)
    write_bytes(path, b"first")
    assert path.read_bytes() == b"first" and os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_removed_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    """Another process takes it for an abandoned one in the moment between the two."""
    lock, looked = files._lock, []

    def late(handle):
        if not looked:
            looked.append(True)
            monkeypatch.setattr(files, "_lock", lock)
            files._remove_abandoned(tmp_path)
            assert os.listdir(tmp_path) == []
        return lock(handle)

    monkeypatch.setattr(files, "_lock", late)
    write_bytes(tmp_path / "file", b"whole")
    assert looked and (tmp_path / "file").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["file"]


def test_only_files_that_are_called_so_are_removed(tmp_path):
    (tmp_path / "kept").touch()
    others = [".jaxgru-.part.txt", "x.jaxgru-0a.part", ".x.part", ".jaxgru.part"]
    for name in others:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".jaxgru-0a.part")
    (tmp_path / ".jaxgru-0b.part").symlink_to("kept")
    (tmp_path / ".jaxgru-0c.part").mkdir()
    write_bytes(tmp_path / "file", b"whole")
    assert {"kept", "file", ".jaxgru-0c.part", *others} <= set(os.listdir(tmp_path))


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a*[b]?" * 42])
def test_the_longest_names_that_files_can_have(tmp_path, name):
    """Linux, NAME_MAX: 255 bytes."""
    write_bytes(tmp_path / name, b"whole")
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(OSError, match="File name too long"):
        write_bytes(tmp_path / ("x" * 256), b"whole")
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.glob", refuse)
    write_bytes(tmp_path / "file", b"whole")
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_is_held_once_and_leaves_no_trace(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"data")
    with locked(path) as ours:
        with locked(path) as theirs:
            assert (ours, theirs) == (True, False)
        with locked(path) as theirs:  # whoever was refused has not let go of it
            assert not theirs
    with locked(path) as ours:
        assert ours
    assert path.read_bytes() == b"data" and os.listdir(tmp_path) == ["file"]


def test_a_folder_that_can_be_written_and_one_that_cannot(tmp_path):
    check_writable(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError):
        check_writable(tmp_path / "missing")


@pytest.mark.parametrize("size, whole", [(3, True), (4, False)])
def test_a_file_larger_than_may_be_is_not_read(tmp_path, size, whole):
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    if whole:
        assert read_bytes(path, at_most=3) == b"xxx"
    else:
        with pytest.raises(OSError, match="it has 4 bytes; at most 3 are allowed"):
            read_bytes(path, at_most=3)


@pytest.mark.parametrize("read", [read_bytes, files.file_hash])
def test_neither_a_pipe_nor_a_device_is_opened(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a pipe or a device"):
            read(path)


def test_files_below_a_folder_are_files_and_nothing_else(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_text(tmp_path / "a" / "b" / "abc", "abc")
    write_text(tmp_path / "empty", "")
    assert files_below(tmp_path) == {"a/b/abc": 3, "empty": 0}
    for make in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("."),
    ):
        make(tmp_path / "a" / "odd")
        for call in (files_below, hashes):
            with pytest.raises(OSError, match="a/odd is a link, a pipe or a device"):
                call(tmp_path)
        (tmp_path / "a" / "odd").unlink()
    with pytest.raises(FileNotFoundError):
        files_below(tmp_path / "missing")
