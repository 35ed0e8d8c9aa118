"""Files are written whole or not at all."""

from __future__ import annotations

import os

import pytest

from jaxgru.files import write_bytes, write_text


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


def test_others_may_read_it(tmp_path):
    write_bytes(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
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
