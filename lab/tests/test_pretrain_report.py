"""Records become tables and figures; the gate."""

import copy
import json

import numpy as np
import pytest

from tisa_lab.pretrain.report import (
    gate,
    groups_of,
    label_of,
    lines_of,
    markdown,
    read_records,
    tables_over_time,
    write_figures,
)

CONFIG = {
    "position": "none", "position_options": {}, "lengths": [[512, 1.0]], "seed": 0, "steps": 10,
}  # fmt: skip


def record(position, seed, loss, **config):
    seen = {"r2": 0.5, "chance": 0.2, "r2_off_diagonal": 0.1, "chance_off_diagonal": 0.0,
            "block": 0.03, "block_squares": 0.2}  # fmt: skip
    return {
        "config": CONFIG | {"position": position, "seed": seed} | config,
        "evaluations": [
            {"step": step, "tokens": 1000 * step, "loss": loss + 1 - step / 10,
             "position": seen if position == "absolute" else {}}
            for step in (0, 5, 10)
        ],
        "parameters": {"positional": 7, "others": 100},
        "speed": {"step_seconds": 0.01},
        "curves": {"offsets": [-1, 0, 1], "scores": [[[0.0, 1.0, 0.5]] * 2] * 3}
        if position == "tisa" else {},
    }  # fmt: skip


RECORDS = [
    record("none", 0, 5.0), record("none", 1, 5.02), record("absolute", 0, 4.5),
    record("absolute", 1, 4.49), record("tisa", 0, 4.4),
]  # fmt: skip


def test_gate():
    found = gate(groups_of(RECORDS))
    assert found["difference"] == pytest.approx(0.515)
    assert found["spread"] == pytest.approx(0.02)
    assert found["passed"]
    close = [record("none", 0, 5.0), record("none", 1, 5.02), record("absolute", 0, 4.95),
             record("absolute", 1, 4.96)]  # fmt: skip
    assert not gate(groups_of(close))["passed"]
    with pytest.raises(ValueError, match="two seeds"):
        gate(groups_of([RECORDS[0], RECORDS[2]]))
    with pytest.raises(ValueError, match="of none and of absolute"):
        gate(groups_of(RECORDS[:2]))


def test_table():
    table = markdown(groups_of(RECORDS)).splitlines()
    assert table[2] == "| tisa | 4.4000 | 1 | +0.6100 | 0.0 M | 7 | 10.0 ms |"
    assert table[3] == "| absolute | 4.4950 | 2 (0.0100) | +0.5150 | 0.0 M | 7 | 10.0 ms |"
    # Loss from 5.4 to 4.4 over 10,000 tokens; that of `none` ends at 5.01.
    assert groups_of(RECORDS)[0].tokens_to(5.01) == pytest.approx(3900.0)
    assert groups_of(RECORDS)[0].tokens_to(4.3) is None
    assert table[4].startswith("| none | 5.0100 | 2 (0.0200) | +0.0000")
    assert "| 5 | 0.500 (0.200) | 0.100 (0.000) | 0.030 | 0.200 |" in tables_over_time(
        groups_of(RECORDS)
    )
    blind = record("absolute", 0, 4.5)
    blind["evaluations"][1]["position"]["r2"] = None  # where P has no variance
    assert "| 5 | – (0.200) | 0.100 (0.000) |" in tables_over_time(groups_of([blind]))
    schedule = CONFIG | {
        "lengths": [[128, 0.9], [512, 0.1]],
        "position_options": {"layers": "first"},
    }
    assert label_of(schedule) == "none layers=first 128→512"


def test_runs_of_different_recipes_are_not_compared():
    other = copy.deepcopy(RECORDS)
    other[0]["config"]["steps"] = 11
    with pytest.raises(ValueError, match="runs of one steps, got 10, 11"):
        groups_of(other)
    other = copy.deepcopy(RECORDS)
    other[0]["validation"] = ["another corpus", 100]
    with pytest.raises(ValueError, match="runs of one validation"):
        groups_of(other)
    for lengths, message in (
        ([[128, 1.0]], "runs of one last length, got 128, 512"),
        ([[128, 0.5], [512, 0.5]], None),
    ):
        other = [*RECORDS, record("tisa", 1, 4.3, lengths=lengths)]
        if message is None:
            assert "tisa 128→512" in [group.label for group in groups_of(other)]
            other.append(record("tisa", 0, 4.3, lengths=[[128, 0.9], [512, 0.1]]))
            message = "of tisa 128→512 that differ in their seed alone"
        with pytest.raises(ValueError, match=message):
            groups_of(other)
    with pytest.raises(ValueError, match=r"seed alone, got seeds \[0, 0\]"):
        groups_of([*RECORDS, record("tisa", 0, 4.3)])


def test_figures(tmp_path):
    for number, one in enumerate(RECORDS):
        folder = tmp_path / "runs" / f"{one['config']['position']}-{number}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(one))
    np.save(
        tmp_path / "runs" / "absolute-2" / "table.npy", np.random.default_rng(0).random((20, 4))
    )
    groups = groups_of(read_records(tmp_path / "runs"))
    written = write_figures(groups, tmp_path / "runs", tmp_path / "figures")
    names = ["loss.png", "toeplitz.png", "curves-tisa.png", "grams.png"]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 5000 for path in written)
    with pytest.raises(ValueError, match="expected folders of finished runs"):
        read_records(tmp_path)


def test_records_are_kept_as_lines(tmp_path):
    records = [one | {"loss": [[1, 2.0]]} for one in RECORDS]
    (tmp_path / "records.jsonl").write_text(lines_of(records))
    kept = read_records(tmp_path / "records.jsonl")
    assert "loss" not in kept[0]
    assert markdown(groups_of(kept)) == markdown(groups_of(records))


def test_a_run_that_diverged_is_a_result(tmp_path):
    nan = record("near-far", 0, 4.0) | {"diverged": {"step": 7}, "curves": {}}
    nan["evaluations"] = nan["evaluations"][:1]
    groups = groups_of([*RECORDS, nan, record("near-far", 1, 4.1)])
    assert groups[-1].label == "near-far"
    assert (
        markdown(groups).splitlines()[-1].startswith("| near-far | diverged (1 of 2) | 2 | – | –")
    )
    assert write_figures(groups, tmp_path, tmp_path / "figures")


def test_lines_that_were_given_back_count_beside_folders(tmp_path):
    (tmp_path / "records.jsonl").write_text(lines_of(RECORDS[:4]))
    for number, one in enumerate(RECORDS[3:]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "record.json").write_text(json.dumps(one))
    assert markdown(groups_of(read_records(tmp_path))) == markdown(groups_of(RECORDS))
