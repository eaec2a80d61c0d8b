"""Records, one a line: whole, each with its checksum, whoever is killed while it writes."""

import json
import multiprocessing
import os

import pytest

from tisa import store

ONE, TWO, THREE = {"n": 1}, {"n": 2, "name": "zwei ä"}, {"n": 3.25}


@pytest.fixture
def lines(tmp_path):
    return store.Lines(tmp_path / "records.jsonl")


def test_a_torn_line_is_neither_read_nor_kept(lines):
    assert lines.read() == ([], 0)
    lines.append(ONE, TWO)
    whole = lines.path.stat().st_size
    with lines.path.open("ab") as file:
        file.write(b"thr" * 50_000)
    assert lines.read() == ([ONE, TWO], whole)
    lines.append(THREE)
    assert lines.read()[0] == [ONE, TWO, THREE]
    assert lines.read(whole) == ([THREE], lines.path.stat().st_size)


def test_lines_that_do_not_fit_leave_no_part(lines, monkeypatch):
    lines.append(ONE)
    before, write = lines.path.read_bytes(), os.write

    def full(file, content):
        if len(content) > 4:
            return write(file, content[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space"):
        lines.append({"n": "seven"})
    assert lines.path.read_bytes() == before


def _append(path, number):
    for _ in range(20):
        store.Lines(path).append({"text": str(number) * 3000})


def test_processes_append_side_by_side(lines):
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_append, args=(lines.path, n)) for n in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    found = [record["text"] for record in lines.read()[0]]
    assert sorted(found) == sorted(str(n) * 3000 for n in range(4) for _ in range(20))


def test_lines_of_before_have_no_checksum_and_are_read(lines):
    lines.path.write_text(json.dumps(ONE) + "\n\n" + json.dumps(TWO) + "\n")
    assert lines.read()[0] == [ONE, TWO]
    lines.append(THREE)
    assert lines.read()[0] == [ONE, TWO, THREE]


def _read_or_complaint(lines):
    try:
        return lines.read()[0]
    except store.Damaged as damaged:
        return str(damaged)


def test_every_flipped_bit_of_a_line_is_found_or_changes_nothing(lines):
    lines.append(ONE, TWO, THREE)
    whole = lines.path.read_bytes()
    end_of_two, found = whole.index(b"\n", whole.index(b"\n") + 1), 0
    for place in range(whole.index(b"\n") + 1, end_of_two + 1):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            lines.path.write_bytes(changed)
            read = _read_or_complaint(lines)
            assert read == [ONE, TWO, THREE] or "records.jsonl, line 2: " in read, (place, bit)
            found += isinstance(read, str)
    assert found > 4 * (end_of_two - len(whole) // 3)


def test_a_complaint_has_the_number_of_its_line(lines):
    lines.append(ONE)
    start = lines.path.stat().st_size
    lines.append(TWO)
    lines.path.write_bytes(lines.path.read_bytes() + b"[1]\n")
    with pytest.raises(store.Damaged, match=r"records.jsonl, line 3: no record, but"):
        lines.read(start)
