"""Faults on purpose, a small form without a compiler: what is left is the old or the new, whole.

Python's own writers and readers fail here, in this process. All commands, native writers too, power
cuts, two writers: `campaign.py`, which `make test-full` runs.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import disk
import shim
from campaign import bits_of, joined
from flips import READS, classes
from tisa import store
from tisa.cli import PROGRAM
from tisa.store.repair import repaired
from tisa.transformer import LanguageModel, TransformerConfig, load, save
from trial import REMEDY, Reference, leaves

ROOT = Path(__file__).parents[2]
SIZES = dict(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)


def model(seed):
    torch.manual_seed(seed)
    return LanguageModel(TransformerConfig(**SIZES))


def numbers(found):
    return store.tensors_digest(found.state_dict())


class Saved:
    """A model that is saved over another one."""

    def begin(self, folder):
        save(model(0), folder / "saved")

    def act(self, folder):
        save(model(1), folder / "saved")

    def read(self, folder):
        return numbers(load(folder / "saved"))


class Appended:
    """Records that are added to a file of them."""

    def begin(self, folder):
        store.Lines(folder / "records.jsonl").append({"n": 1})

    def act(self, folder):
        store.Lines(folder / "records.jsonl").append({"n": 2}, {"n": 3})

    def read(self, folder):
        return [record["n"] for record in store.Lines(folder / "records.jsonl").read()[0]]


class Replaced:
    """A folder that is written anew."""

    def begin(self, folder, content="old"):
        with store.new_folder(folder / "out", replace=True) as unfinished:
            for name in ("a", "b"):
                (unfinished / name).write_text(content)
            store.seal_folder(unfinished, "thing", {})

    def act(self, folder):
        self.begin(folder, "new")

    def read(self, folder):
        store.check_folder(folder / "out", "thing")
        return [(folder / "out" / name).read_text() for name in ("a", "b")]


class Made:
    """A folder that is made, and is not there before."""

    def begin(self, folder):
        folder.mkdir()

    def act(self, folder):
        with store.new_folder(folder / "out") as unfinished:
            (unfinished / "a").write_text("new")

    def read(self, folder):
        return (folder / "out" / "a").read_text() if (folder / "out").exists() else None


class Repaired:
    """A file of records of which one is damaged."""

    def begin(self, folder):
        lines = store.Lines(folder / "out" / "records.jsonl")
        lines.append({"n": 1}, {"n": 2}, {"n": 3})
        lines.path.write_bytes(lines.path.read_bytes().replace(b'"n": 2', b'"n": 5'))

    def act(self, folder):
        repaired(folder / "out")

    def read(self, folder):
        aside = folder / "out" / "records.jsonl.damaged"
        kept = [r["n"] for r in store.Lines(folder / "out" / "records.jsonl").read()[0]]
        return [kept, aside.read_bytes().count(b"\n")]


WRITERS = {writer.__name__: writer() for writer in (Saved, Appended, Replaced, Made, Repaired)}
TOLD = (ValueError, OSError)


def ended(action, folder):
    """Return whether it did not end with a mistake, and what it returned.

    A mistake is told with a remedy.
    """
    try:
        return True, action(folder)
    except TOLD as wrong:
        said = PROGRAM.said(wrong, [])
        assert REMEDY.search(said), said
        return False, None


def states(writer, folder):
    """Return what is read before and after, and how many calls of each kind there are."""
    writer.begin(folder)
    _, old = ended(writer.read, folder)
    patched = shim.Patched()
    patched.arm(folder)
    try:
        writer.act(folder)
    finally:
        patched.disarm()
    return old, writer.read(folder), patched.counts()


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_call_fails_the_old_or_the_new_is_there_whole(name, tmp_path):
    writer = WRITERS[name]
    old, new, counts = states(writer, tmp_path / "whole")
    assert min(counts["write"], counts["fsync"]) > 0
    tried = 0
    for fault in shim.FAULTS:
        for k in range(1, counts[fault.kind] + 1):
            folder = tmp_path / str(tried)
            writer.begin(folder)
            patched = shim.Patched()
            patched.arm(folder, fault, k)
            try:
                done, _ = ended(writer.act, folder)
            finally:
                patched.disarm()
            tried += 1
            whole, found = ended(writer.read, folder)
            assert found == new if done else not whole or found in (old, new), (fault, k)
            if not done:
                writer.act(folder)
                assert writer.read(folder) == new, (fault, k)
    assert tried >= sum(counts.values())


def test_no_flipped_bit_is_read_as_another_number(tmp_path):
    for writer in (Saved(), Appended(), Replaced()):
        folder = tmp_path / type(writer).__name__
        writer.begin(folder)
        whole, rolled = writer.read(folder), random.Random(0)
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size):
            before = path.read_bytes()
            for kind, places in classes(path).items():
                for place in rolled.sample(places, min(6, len(places))):
                    content = bytearray(before)
                    content[place] ^= 1 << rolled.randrange(8)
                    path.write_bytes(content)
                    is_read, found = ended(writer.read, folder)
                    assert not is_read or found == whole, (path.name, kind, place)
            path.write_bytes(before)


def test_a_disk_keeps_what_was_flushed(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    there = disk.Disk(tmp_path)
    do = lambda *step: there.do(disk.Step(*step))  # noqa: E731
    left = lambda: [there.after(loss) for loss in disk.LOSSES]  # noqa: E731
    do("create", "new", "", 0, b"")
    do("write", "new", "", 0, b"new")
    do("rename", "new", "old", 0, b"")
    assert left() == [{"old": b"old"}, {"old": b""}, {"old": b"new"}]
    do("fsync", "old", "", 0, b"")
    assert left() == [{"old": b"old"}, {"old": b"new"}, {"old": b"new"}]
    do("fsync", "", "", 0, b"")
    assert left() == [{"old": b"new"}] * 3
    do("folder", "a", "", 0, b"")
    do("create", "a/b", "", 0, b"")
    do("exchange", "a", "old", 0, b"")
    assert left() == [{"old": b"new"}, *[{"a": b"new", "old": None, "old/b": b""}] * 2]


PAGE = """<thead><tr><th>method</th><th>loss</th><th>time</th></tr></thead>
<tr class="ours"><td>none</td><td>2.500</td><td>{}</td></tr>
<thead><tr><th>method</th><th>right</th><th>wrong</th></tr></thead>
<tr><td>none</td><td>1</td><td>{}</td></tr>
<p>{}, torch 2</p>
"""


def test_a_page_is_compared_without_its_date_commit_and_measured_times(tmp_path):
    def left(time, wrong, made):
        (tmp_path / "page.html").write_text(PAGE.format(time, wrong, made))
        (tmp_path / "page.md").write_text(f"| loss | time |\n|---|---|\n| 2.5 | {time} |\n")
        return leaves(tmp_path, ("*",))

    reference = Reference.of([left("1.00", 3, "2026-11-19, commit 55bce80")] * 2)
    assert not reference.differences(left("2.41", 3, "2026-11-20, commit 4f75df1"))
    assert reference.differences(left("1.00", 4, "2026-11-19, commit 55bce80")) == ["page.html:3"]


def part(found, not_begun=(), commit="1"):
    names = list(dict.fromkeys([*(what for row in found.values() for what in row), *not_begun]))
    return {"about": [{"commit": commit, "parts": names}],
            "commands": {name: {"write": int(commit)} for name in names},
            "found": found, "not begun": dict(not_begun)}  # fmt: skip


def test_parts_of_a_campaign_are_joined_and_what_is_run_again_stands():
    first = part(
        {"read": {"a": {"lost": 1}, "b": {"detected": 2}}, "write": {"a": {"detected": 3}}},
        {"b": 7},
    )
    # The fault "write" was not met again, so that nothing of the first part's may stay.
    second = part({"read": {"a": {"detected": 4}}, "sync": {"c": {"harmless": 1}}}, {"a": 1}, "2")
    found = joined(first, second)
    assert found["found"] == {
        "read": {"a": {"detected": 4}, "b": {"detected": 2}}, "sync": {"c": {"harmless": 1}},
    }  # fmt: skip
    assert found["not begun"] == {"b": 7, "a": 1}
    assert [(one["commit"], one["parts"]) for one in found["about"]] == [
        ("1", ["b"]), ("2", ["a", "c"]),
    ]  # fmt: skip
    assert {n: one["write"] for n, one in found["commands"].items()} == {"a": 2, "b": 1, "c": 2}
    third = part({"read": {"b": {"detected": 1}}}, (), "3")
    assert [one["commit"] for one in joined(found, third)["about"]] == ["2", "3"]


def test_bits_are_drawn_in_parts_as_in_the_whole():
    drawn = bits_of(1000)
    assert drawn.keys() == {read.name for read in READS}
    assert sum(drawn.values()) == 1000
    assert min(drawn.values()) > 0


@pytest.mark.full
@pytest.mark.skipif(shim.compiler() is None, reason="needs Linux and a C compiler: install gcc")
def test_the_campaign_loses_nothing(tmp_path):
    found = subprocess.run(
        [sys.executable, ROOT / "tests/faults/campaign.py", "--out", tmp_path / "record.json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "lab")))},
        capture_output=True, text=True,
    )  # fmt: skip
    print(found.stdout)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    record = json.loads((tmp_path / "record.json").read_text())
    assert all(one["all seen"] for one in record["commands"].values())


def test_the_page_has_the_numbers_of_the_record():
    source = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(source)
    source.loader.exec_module(tables)
    page = (ROOT / "docs/reliability.md").read_text()
    assert tables.page(page, tables.PAGES["reliability.md"]) == page
