"""Durable files: whole or not at all, whoever is killed, and whatever fails."""

import errno
import multiprocessing
import os
import sys

import pytest

from tisa import store
from tisa.store import files
from tisa.store.files import umask


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

    with pytest.raises(OSError, match=r"No space"):
        write("broken")
    assert os.listdir(tmp_path) == []
    path.mkdir()
    write("first")
    assert (path / "a").read_text() == "first"
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask()
    with pytest.raises(FileExistsError, match=r"is there already"):
        write("second")
    assert (path / "a").read_text() == "first"
    write("second", replace=True)
    assert (path / "a").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_ones_own_may_be_written_again(tmp_path):
    (tmp_path / "index.html").touch()
    with pytest.raises(FileExistsError, match=r"is there already"):
        store.check_new_folder(tmp_path, own=("numbers.json", "parts/made_with.json"))
    (tmp_path / "numbers.json").touch()
    store.check_new_folder(tmp_path, own=("numbers.json", "parts/made_with.json"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is a file"):
        store.check_new_folder(tmp_path / "out", replace=True)


def test_what_is_renamed_is_on_the_disk_first(tmp_path, monkeypatch):
    done = []
    flush, replace = files.flush, os.replace
    monkeypatch.setattr(files, "flush", lambda p: (done.append(("flush", p.name)), flush(p)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append(("rename", b.name)), replace(a, b))
    )
    with store.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "a").write_text("x")
    assert [what for what, _ in done] == ["flush", "flush", "rename", "flush"]
    assert done[0] == ("flush", "a")
    assert done[2:] == [("rename", "out"), ("flush", tmp_path.name)]


def test_a_lock_is_had_by_one(tmp_path):
    with store.locked(tmp_path / "lock") as mine:
        assert mine
        with store.locked(tmp_path / "lock", wait=False) as second:
            assert not second
    with store.locked(tmp_path / "lock", wait=False) as again:
        assert again


def _write_folder(path, began, may_end):
    with store.new_folder(path) as unfinished:
        (unfinished / "a").write_text("first")
        began.set()
        may_end.wait(30)


def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    fork = multiprocessing.get_context("fork")
    began, may_end = fork.Event(), fork.Event()
    first = fork.Process(target=_write_folder, args=(tmp_path / "out", began, may_end))
    first.start()
    assert began.wait(30)
    with (
        pytest.raises(BlockingIOError, match=rf"out: process {first.pid} on .* writes there; wait"),
        store.new_folder(tmp_path / "out"),
    ):
        pass
    may_end.set()
    first.join()
    assert (tmp_path / "out" / "a").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_a_killed_writer_leaves_the_place_to_others(tmp_path):
    fork = multiprocessing.get_context("fork")
    began = fork.Event()
    first = fork.Process(target=_write_folder, args=(tmp_path / "out", began, fork.Event()))
    first.start()
    assert began.wait(30)
    first.kill()
    first.join()
    with store.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "a").write_text("second")
    assert (tmp_path / "out" / "a").read_text() == "second"


@pytest.mark.parametrize(
    "wrong",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:668] . StreamWriter failed writing"),
        RuntimeError("basic_ios::clear: iostream error"),
        OSError("60 requested and 0 written"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_the_place_and_a_remedy(wrong, tmp_path):
    def full():
        with store.new_folder(tmp_path / "out") as unfinished:
            (unfinished / "a").write_text("x")
            raise wrong

    with pytest.raises(OSError, match=r"out: could not be written .*, and nothing of it is left; "):
        full()
    assert os.listdir(tmp_path) == []


def test_other_mistakes_are_told_as_they_are(tmp_path):
    def mistaken():
        with store.new_folder(tmp_path / "out"):
            raise ValueError("texts must be two or more")

    with pytest.raises(ValueError, match=r"^texts must be two or more$"):
        mistaken()


def test_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    flush = files.flush
    monkeypatch.setattr(files, "flush", lambda p: (flushed.append(p), flush(p)))
    store.make_folder(tmp_path / "a" / "b")
    assert flushed == [tmp_path, tmp_path / "a"]


def test_a_lock_in_a_new_folder_leaves_no_name_that_is_not_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files, "flush", flushed.append)
    with files.locked(tmp_path / "run" / "grid" / ".lock"):
        pass
    assert flushed == [tmp_path, tmp_path / "run"]


def test_a_folder_that_cannot_take_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "a").write_text("old")
    rename, calls = os.replace, []

    def second_fails(one, other):
        calls.append(other)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(one, other)

    monkeypatch.setattr(files, "exchanged", lambda one, other: False)
    monkeypatch.setattr(os, "replace", second_fails)

    def write():
        with store.new_folder(path, replace=True) as unfinished:
            (unfinished / "a").write_text("new")

    with pytest.raises(OSError, match=r"could not be written"):
        write()
    assert (path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_there_is_always_a_folder_of_the_name(tmp_path, monkeypatch):
    path = tmp_path / "out"

    def write(content):
        with store.new_folder(path, replace=True) as unfinished:
            (unfinished / "a").write_text(content)

    write("old")
    # Two renames, of which the first takes the name away: nobody asks for them.
    monkeypatch.setattr(os, "replace", None)
    seen, remove = [], files.shutil.rmtree
    monkeypatch.setattr(
        files.shutil, "rmtree",
        lambda folder, **more: (seen.append([p.read_text() for p in folder.glob("a")]),
                                remove(folder, **more)),
    )  # fmt: skip
    write("new")
    assert (path / "a").read_text() == "new"
    assert seen[0] == ["old"]
    assert os.listdir(tmp_path) == ["out"]


def _write_into(path, began, may_end):
    with store.own_folder(path, own=("a",)):
        began.set()
        may_end.wait(30)
        store.write_text(path / "a", "first")


def test_a_folder_that_is_written_into_has_one_writer(tmp_path):
    path = tmp_path / "new" / "out"
    fork = multiprocessing.get_context("fork")
    began, may_end = fork.Event(), fork.Event()
    first = fork.Process(target=_write_into, args=(path, began, may_end))
    first.start()
    assert began.wait(30)
    told = rf"out: process {first.pid} on .* writes there; wait"
    with pytest.raises(BlockingIOError, match=told), store.own_folder(path, own=("a",)):
        pass
    may_end.set()
    first.join()
    assert os.listdir(path) == ["a"]
    with store.own_folder(path, own=("a",)):
        assert (path / "a").read_text() == "first"
    with pytest.raises(FileExistsError, match=r"not empty"), store.own_folder(path, own=("b",)):
        pass


def test_what_a_killed_process_left_makes_no_folder_somebody_elses(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    (path / ".a.7.unfinished").touch()
    (path / ".parts.lock.held-by").touch()
    (path / "parts").mkdir()
    (path / "parts" / ".b.json.8.unfinished").touch()
    assert store.is_unused(path)
    (path / "parts" / "b.json").touch()
    assert not store.is_unused(path)
    (path / "parts" / "b.json").unlink()
    with store.own_folder(path, own=("a",)):
        store.write_text(path / "a", "whole")
    assert (path / "a").read_text() == "whole"


def test_a_folder_into_which_nothing_was_written_is_not_left(tmp_path):
    def fails():
        with store.own_folder(tmp_path / "out", own=()):
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match=r"a mistake"):
        fails()
    assert os.listdir(tmp_path) == []


def test_a_place_that_is_held_is_written_by_its_holder(tmp_path):
    with store.alone(tmp_path / "out"), store.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "a").touch()
    assert os.listdir(tmp_path) == ["out"]


def test_a_failed_read_is_told_with_the_file_and_a_remedy(tmp_path, monkeypatch):
    store.write_json(tmp_path / "a.json", {"n": 1})
    store.write_sealed(tmp_path / "a.bin", {}, b"x")
    store.Lines(tmp_path / "a.jsonl").append({"n": 1})
    real = open

    class Broken:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def read(self, *size):
            raise OSError(errno.EIO, "Input/output error")

        readline = read

    monkeypatch.setattr("io.open", lambda path, *a, **more: Broken(real(path, *a, **more)))
    for name, read in (
        ("a.json", lambda path: store.read_json(path, remedy="")),
        ("a.bin", lambda path: store.read_bytes(path, remedy="")),
        ("a.jsonl", lambda path: store.Lines(path).read()),
    ):
        with pytest.raises(OSError, match=rf"/{name}: could not be read \(Input/output error\);"):
            read(tmp_path / name)


def saved_anew(folder, files, **options):
    with store.renewed(folder, mark="mark", **options) as out:
        for name, content in files.items():
            (out / name).write_text(content)


def test_a_folder_that_is_written_anew_gives_way_in_one_step(tmp_path):
    folder = tmp_path / "model"
    saved_anew(folder, {"mark": "", "weights": "one", "card": "as written"})
    (folder / "card").write_text("as edited")
    (folder / "old-1.part").write_text("one")
    (folder / "runs").mkdir()
    (folder / "runs/old-1.part").write_text("of a run")

    def half_way():
        with store.renewed(folder, mark="mark", first=("card",)) as out:
            assert (out / "card").read_text() == "as edited"
            (out / "weights").write_text("two")
            assert (folder / "weights").read_text() == "one"
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    assert (folder / "weights").read_text() == "one"
    saved_anew(folder, {"mark": "", "weights": "two"}, first=("card",), stale=("old-*.part",))
    found = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.*")}
    assert found == {"runs/old-1.part": "of a run"}
    assert [(folder / name).read_text() for name in ("weights", "card")] == ["two", "as edited"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_somebody_else_s_folder_is_written_in_place(tmp_path, monkeypatch):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    number = folder.stat().st_ino
    saved_anew(folder, {"mark": ""})
    assert (folder / "notes").read_text() == "mine"
    assert folder.stat().st_ino == number
    # Now it is ours, but somebody stands in it.
    monkeypatch.chdir(folder)
    saved_anew(folder, {"weights": "one"})
    assert folder.stat().st_ino == number
