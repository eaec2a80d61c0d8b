"""Durable files: whole or not at all, whoever is killed, and whatever fails."""

import multiprocessing
import os

import pytest

from tisa import store


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "file.txt"
    store.write_text(path, "one")
    store.write_text(path, "zwei ä")
    assert path.read_text(encoding="utf-8") == "zwei ä"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    store.write_bytes(path, b"old")

    def interrupted():
        with store.new_file(path) as unfinished:
            unfinished.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"

    def write(content, **options):
        with store.new_folder(path, **options) as unfinished:
            (unfinished / "a").write_text(content)
            if content == "broken":
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write("broken")
    assert os.listdir(tmp_path) == []
    path.mkdir()
    write("first")
    assert (path / "a").read_text() == "first"
    assert path.stat().st_mode & 0o777 == 0o777 & ~store._umask()
    with pytest.raises(FileExistsError, match="is there already"):
        write("second")
    assert (path / "a").read_text() == "first"
    write("second", replace=True)
    assert (path / "a").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_ones_own_may_be_written_again(tmp_path):
    (tmp_path / "index.html").touch()
    with pytest.raises(FileExistsError, match="is there already"):
        store.check_new_folder(tmp_path, own=("numbers.json", "parts/made_with.json"))
    (tmp_path / "numbers.json").touch()
    store.check_new_folder(tmp_path, own=("numbers.json", "parts/made_with.json"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        store.check_new_folder(tmp_path / "out", replace=True)


def test_what_is_renamed_is_on_the_disk_first(tmp_path, monkeypatch):
    done = []
    flush, replace = store._flush, os.replace
    monkeypatch.setattr(store, "_flush", lambda p: (done.append(("flush", p.name)), flush(p)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append(("rename", b.name)), replace(a, b))
    )
    with store.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "a").write_text("x")
    assert [what for what, _ in done] == ["flush", "flush", "rename", "flush"]
    assert done[0] == ("flush", "a")
    assert done[2:] == [("rename", "out"), ("flush", tmp_path.name)]


def test_a_torn_line_is_neither_read_nor_kept(tmp_path):
    lines = store.Lines(tmp_path / "records.jsonl")
    assert lines.read() == ([], 0)
    lines.append("one", "two")
    with lines.path.open("ab") as file:
        file.write(b"thr" * 50_000)
    assert lines.read() == (["one", "two"], 8)
    lines.append("three")
    assert lines.path.read_text() == "one\ntwo\nthree\n"
    assert lines.read(8) == (["three"], 14)


def test_lines_that_do_not_fit_leave_no_part(tmp_path, monkeypatch):
    lines = store.Lines(tmp_path / "records.jsonl")
    lines.append("one")
    write = os.write

    def full(file, content):
        if len(content) > 4:
            return write(file, content[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        lines.append("seven")
    assert lines.path.read_text() == "one\n"


def _append(path, number):
    for _ in range(20):
        store.Lines(path).append(str(number) * 3000)


def test_processes_append_side_by_side(tmp_path):
    path = tmp_path / "records.jsonl"
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_append, args=(path, n)) for n in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    found, _ = store.Lines(path).read()
    assert sorted(found) == sorted(str(n) * 3000 for n in range(4) for _ in range(20))


def test_a_lock_is_had_by_one(tmp_path):
    with store.locked(tmp_path / "lock") as mine:
        assert mine
        with store.locked(tmp_path / "lock", wait=False) as second:
            assert not second
    with store.locked(tmp_path / "lock", wait=False) as again:
        assert again
