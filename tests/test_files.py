"""Files are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from jaxgru.files import (
    check_writable,
    files_below,
    hashes,
    locked,
    read_bytes,
    remove_parts,
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


def test_the_parts_of_a_write_that_was_killed_are_removed(tmp_path, monkeypatch):
    """Killed at its last moment: neither renamed nor tidied up."""

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(os, "unlink", lambda _: None)
        with pytest.raises(Killed):
            write_bytes(tmp_path / "file", b"new")
    assert len(os.listdir(tmp_path)) == 1
    write_bytes(tmp_path / "file", b"whole")
    write_bytes(tmp_path / "file2", b"other")
    remove_parts(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "file2"]


@pytest.mark.parametrize("name", ["file", "[lab].pth", "a*b", "?"])
def test_only_the_parts_of_that_very_file_are_removed(tmp_path, name):
    """A name may look like a pattern, or begin another's."""
    others = [f".{name}.txt.x1y2z3w4.part", ".l.pth.x1y2z3w4.part", f".{name}.part", ".ab.0a.part"]
    for part in (*others, f".{name}.x1y2z3w4.part"):
        (tmp_path / part).write_bytes(b"half")
    remove_parts(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


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
        with pytest.raises(OSError, match="it has 4 bytes; there may be 3"):
            read_bytes(path, at_most=3)


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
