"""Any folder: what is in it, what of it is damaged and where, and what can be repaired."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tisa import store
from tisa.store.repair import repaired
from tisa.store.verification import verified


def checkpoint(folder, step, kind="pretraining checkpoint"):
    with store.new_folder(folder / "checkpoints" / f"step-{step}") as unfinished:
        (unfinished / "weights.bin").write_bytes(bytes([step]) * 5000)
        store.seal_folder(unfinished, kind, {"config": {"steps": 9}, "seed": 3})


@pytest.fixture
def run(tmp_path):
    out = tmp_path / "run"
    store.write_json(out / "run.json", {"config": {"steps": 9}})
    for step in (4, 8):
        checkpoint(out, step)
    store.Lines(out / "records.jsonl").append({"n": 1}, {"n": 2}, {"n": 3})
    store.write_sealed(out / "distil.pt", {"kind": "distillation checkpoint"}, b"x" * 300)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    told = store.sealed({"model": "m", "tensors": store.tensors_digest(tensors)})
    store.write_bytes(out / "starts" / "k.safetensors", save(tensors, {"tisa": json.dumps(told)}))
    return out


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def damaged(place):
    return [item for item in verified(place) if item.state == "damaged"]


def test_each_thing_says_what_it_is_and_what_it_was_made_from(run):
    found = {item.path.name: item for item in verified(run)}
    assert {item.state for item in found.values()} == {"whole"}
    assert sorted(found) == [
        "distil.pt", "k.safetensors", "records.jsonl", "run.json", "step-4", "step-8"
    ]  # fmt: skip
    assert found["step-8"].kind == "pretraining checkpoint"
    assert found["step-8"].made_from == {"config.steps": 9, "seed": 3}
    assert found["records.jsonl"].made_from == {"records": 3}


def test_every_flipped_byte_is_named_with_its_file(run):
    for path in sorted(p for p in run.rglob("*") if p.is_file() and p.stat().st_size):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            flip(path, place)
            assert len(damaged(run)) == 1, (path, place)
            (item,) = damaged(run)
            assert path.name in item.damages[0], (path, place)
            assert "bytes " in item.damages[0], (path, place, item)
            path.write_bytes(whole)


def test_a_damaged_checkpoint_is_set_aside_where_one_before_it_is_whole(run):
    flip(run / "checkpoints/step-8/weights.bin", 70)
    (item,) = damaged(run)
    assert item.damages == ("weights.bin is damaged, bytes 0 to 4,999",)
    assert repaired(run) == [f"set aside as step-8.damaged: {run}/checkpoints/step-8"]
    assert damaged(run) == []
    # The last one is no repair: nothing is left to go on from.
    flip(run / "checkpoints/step-4/manifest.json", 70)
    assert repaired(run) == []
    assert [item.path.name for item in damaged(run)] == ["step-4"]


def test_damaged_lines_are_taken_out_and_kept(run):
    path = run / "records.jsonl"
    flip(path, path.read_bytes().index(b'"n": 2') + 5)
    with path.open("ab") as file:
        file.write(b'{"n": 4')
    told = damaged(run)[0].damages
    assert told[0].startswith("records.jsonl, line 2, bytes ")
    assert told[1].endswith(": a line without an end")
    assert repaired(run) == [f"2 lines taken out, into records.jsonl.damaged: {path}"]
    assert store.Lines(path).read()[0] == [{"n": 1}, {"n": 3}]
    assert path.with_name("records.jsonl.damaged").read_bytes().endswith(b'{"n": 4\n')
    assert damaged(run) == []


def test_what_is_made_again_is_set_aside(run):
    flip(run / "starts/k.safetensors", -1)
    flip(run / "run.json", 20)
    assert len(repaired(run)) == 2
    assert damaged(run) == []
    assert (run / "starts/k.safetensors.damaged").is_file()


def test_what_a_killed_process_left_is_removed(run):
    (run / "checkpoints/.step-12.unfinished").mkdir()
    (run / f".run.json.{os.getpid()}.unfinished").touch()
    (run / ".run.json.99999999.unfinished").write_text("half")
    (run.parent / ".run.abc.unfinished").mkdir()
    assert [item.state for item in verified(run)].count("left over") == 4
    assert len(repaired(run)) == 3
    # Its process lives: this one.
    left = [item.path.name for item in verified(run) if item.state == "left over"]
    assert left == [f".run.json.{os.getpid()}.unfinished"]


def test_a_folder_lost_between_two_names_is_brought_back(run):
    os.replace(run, run.parent / ".run.abc.before")
    assert damaged(run)[0].damages == ("is missing; as it was before, it lies in .run.abc.before",)
    assert repaired(run) == [f"brought back as it was before: {run}"]
    assert damaged(run) == []


def test_what_could_not_be_read_once_is_not_damaged(run, monkeypatch):
    path, read, answers = run / "run.json", Path.read_bytes, iter([False])

    def fails_once(self):
        if self == path and not next(answers, True):
            raise OSError(errno.EIO, "Input/output error")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", fails_once)
    assert repaired(run) == []
    assert damaged(run) == []


def _hold(path, began, may_end):
    with store.locked(path):
        began.set()
        may_end.wait(30)


@pytest.mark.parametrize("lock", [".lock", "claims/job"])
def test_a_repair_is_refused_while_somebody_writes(run, lock):
    (run / "claims").mkdir()
    (run / "claims" / "job").touch()
    fork = multiprocessing.get_context("fork")
    began, may_end = fork.Event(), fork.Event()
    writer = fork.Process(target=_hold, args=(run / lock, began, may_end))
    writer.start()
    assert began.wait(30)
    with pytest.raises(BlockingIOError, match=r"process .*writes there"):
        repaired(run)
    may_end.set()
    writer.join()
    assert repaired(run) == []


def test_a_manifest_that_is_missing_is_told_and_not_invented(run):
    folder = run / "checkpoints/step-8"
    (folder / "state.json").write_text('{"format": 2}')
    (folder / "manifest.json").unlink()
    (item,) = damaged(run)
    assert item.damages == ("manifest.json is missing, and nothing proves state.json",)
    repaired(run)
    assert not (run / "checkpoints/step-8").exists()


def test_a_model_of_others_is_checked_for_its_form(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(save({"a": torch.ones(9)}))
    (item,) = verified(tmp_path)
    assert (item.kind, item.state) == ("model", "no checksum")
    os.truncate(tmp_path / "model.safetensors", 90)
    assert damaged(tmp_path)[0].damages[0].startswith("model.safetensors: has 90 bytes and not ")
    assert damaged(tmp_path)[0].repair == ""


def test_links_to_folders_and_names_outside_are_not_followed(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "broken.json").write_text("{")
    (run / "link").symlink_to(tmp_path / "other")
    assert damaged(run) == []
    store.write_json(run / "checkpoints/step-8/manifest.json",
                     {"kind": "x", "identity": {}, "files": {"../../../other": {}}})  # fmt: skip
    assert "outside of the folder" in damaged(run)[0].damages[0]


def test_what_is_nothing_of_ours_is_told(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"holds nothing that this package writes.*; name"):
        verified(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is not there"):
        verified(tmp_path / "nowhere")
