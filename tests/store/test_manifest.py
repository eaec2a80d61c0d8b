"""A folder's manifest: what it is, what it was made from, and whether it is whole."""

import json
import os

import pytest

from tisa import store
from tisa.store import files, seals
from tisa.store.seals import BLOCK

KIND, IDENTITY = "test folder", {"config": {"steps": 3}, "seed": 0}


@pytest.fixture
def folder(tmp_path):
    with store.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "weights.bin").write_bytes(bytes(range(256)) * (3 * BLOCK // 256))
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "state.json").write_text(json.dumps({"step": 3}))
        (unfinished / ".lock").touch()
        store.seal_folder(unfinished, KIND, IDENTITY)
    return tmp_path / "out"


def test_a_whole_folder_is_proved(folder):
    found = store.check_folder(folder, KIND, identity=IDENTITY)
    assert (found.kind, found.identity) == (KIND, IDENTITY)
    assert sorted(found.files) == ["inner/state.json", "weights.bin"]
    assert found.files["weights.bin"]["size"] == 3 * BLOCK


def test_a_folder_of_before_has_none(tmp_path):
    assert store.check_folder(tmp_path, KIND) is None


def test_damage_is_told_with_its_place(folder):
    with open(folder / "weights.bin", "r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"x")
    told = f"weights.bin is damaged, bytes {BLOCK:,} to {2 * BLOCK - 1:,}; remove it"
    with pytest.raises(store.Damaged, match=told):
        store.check_folder(folder, KIND, remedy="remove it")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: os.truncate(f / "weights.bin", 7), "weights.bin has 7 bytes and not 3,145,728"),
        (lambda f: (f / "inner" / "state.json").unlink(), "inner/state.json is missing"),
        (lambda f: os.truncate(f / store.MANIFEST, 40), "manifest.json: no JSON"),
        (
            lambda f: (f / store.MANIFEST).write_text(
                (f / store.MANIFEST).read_text().replace("3145728", "3145729")
            ),
            "manifest.json: not as it was written",
        ),
    ],
)
def test_what_is_lost_is_told(folder, change, told):
    change(folder)
    with pytest.raises(store.Damaged, match=told):
        store.check_folder(folder, KIND)


def test_another_folder_in_its_place_is_told(folder):
    with pytest.raises(store.Damaged, match=r"expected a prepared corpus, got a test folder"):
        store.check_folder(folder, "prepared corpus")
    with pytest.raises(store.Damaged, match=r"is of another run .other seed.; left aside"):
        store.check_folder(folder, KIND, identity=IDENTITY | {"seed": 1}, remedy="left aside")


def test_the_codes_version_is_told_and_not_compared(tmp_path):
    (tmp_path / "a").touch()
    store.seal_folder(tmp_path, KIND, IDENTITY | {store.CODE: "1.0"})
    found = store.check_folder(tmp_path, KIND, identity=IDENTITY | {store.CODE: "2.0"})
    assert found.identity[store.CODE] == "1.0"


def test_files_are_written_with_their_manifest_beside_others(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    store.write_files(tmp_path, KIND, IDENTITY, {"a.md": "ä", "b.png": b"\x00"})
    assert sorted(store.check_folder(tmp_path, KIND).files) == ["a.md", "b.png"]
    (tmp_path / "a.md").write_text("b")
    with pytest.raises(store.Damaged, match=r"a.md has 1 bytes and not 2"):
        store.check_folder(tmp_path, KIND)


def test_a_file_that_cannot_be_read_is_damage(folder, monkeypatch):
    def broken(file, kind):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", broken)
    with pytest.raises(store.Damaged, match=r"state.json could not be read .Input/output error."):
        store.check_folder(folder, KIND)


def test_what_is_sealed_is_on_the_disk_before_the_manifest(tmp_path, monkeypatch):
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (made / name).write_text("x")
    flushed = []
    monkeypatch.setattr(seals, "flush", lambda path: flushed.append(path) or real(path))
    real = files.flush
    store.seal_folder(made, "thing", {})
    assert {made / "a", made / "inner/b", made, made / "inner", tmp_path} == set(flushed)
