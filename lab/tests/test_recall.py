"""Recall says what it is; what is learned is told apart; models are trained once."""

import json
import math

import pytest
import torch

import command
from tisa_lab.probes.jobs import Probe, run_jobs
from tisa_lab.probes.race import ProbeConfig
from tisa_lab.probes.recall import KEYS, PAIRS, RECALLS, VALUES, Before, RecallConfig, pairs, run
from tisa_lab.probes.report import markdown
from tisa_lab.probes.tasks import NO_ANSWER
from tisa_lab.view import Silent

TINY = RecallConfig(steps=2, batch_size=2, hidden_size=8, num_attention_heads=2, asked=32,
                    factors=(1, 2))  # fmt: skip


@pytest.mark.parametrize("count", [1, PAIRS])
@pytest.mark.parametrize("length", [3 * PAIRS, 37])
def test_a_value_is_asked_for_where_its_key_comes_again(count, length):
    tokens, answers = pairs(99, length, torch.Generator().manual_seed(0), count=count)
    room, firsts = length - count, set()
    for row, asked in zip(tokens.tolist(), answers.tolist(), strict=True):
        stated = {}
        for place in range(room):
            if VALUES <= row[place] < VALUES + KEYS:
                assert row[place] not in stated
                assert row[place + 1] < VALUES
                stated[row[place]] = row[place + 1]
                firsts.add(place)
        assert len(stated) == count
        # Nothing else stands there.
        noise = [token for token in row[:room] if token >= VALUES + KEYS]
        assert len(noise) == room - 2 * count
        assert asked[:room] == [NO_ANSWER] * room
        assert sorted(row[room:]) == sorted(stated)
        assert asked[room:] == [stated[key] for key in row[room:]]
    # Anywhere: from the first place to the last that has room for two.
    assert {0, room - 2} <= firsts


def test_the_first_layer_is_asked_for_the_token_before():
    model = TINY.model("t5", 48, is_causal=True)
    before, tokens = Before(model), torch.randint(48, (2, 9))
    model.transformer(tokens)
    torch.nn.init.zeros_(before.map.weight)
    torch.nn.init.zeros_(before.map.bias)
    assert before(tokens).item() == pytest.approx(math.log(48))
    # A map that says the token before, whatever the layer said, at all places but the first.
    before.map.bias.data[7] = 50.0
    assert before(torch.full_like(tokens, 7)).item() == pytest.approx(0.0, abs=1e-6)
    # The last layer knows nothing of it.
    torch.nn.init.ones_(before.map.weight)
    before(tokens).backward()
    first, last = model.transformer.blocks
    assert all(one.grad is not None for one in first.feed_forward.parameters())
    assert all(one.grad is None for one in last.parameters())


def test_models_are_trained_once_and_side_by_side_in_one_folder(tmp_path):
    race = ProbeConfig(length=12, factors=(1,), steps=1, batch_size=2, hidden_size=8, asked=32)
    jobs = [Probe(race, "absolute", "find"), Probe(TINY, "fox", "recall")]
    rows = run_jobs(jobs[:1], tmp_path, device="cpu", view=Silent())
    assert [(row["method"], row["task"]) for row in rows] == [("absolute", "find")]
    text = (tmp_path / "records.jsonl").read_text()
    rows = run_jobs(jobs, tmp_path, device="cpu", view=Silent())
    again = (tmp_path / "records.jsonl").read_text()
    assert again.startswith(text)
    assert len(again.splitlines()) == 2
    named = [(row["method"], row["task"]) for row in rows]
    assert named == [("absolute", "find"), ("fox", "recall"), ("fox", "passkey")]
    # Other sizes are another model.
    other = Probe(RecallConfig(**vars(TINY) | {"steps": 3}), "fox", "recall")
    assert other.key != jobs[1].key
    # A failed one is told with its method.
    with pytest.raises(ValueError, match="find: fox failed: "):
        run_jobs([Probe(race, "fox", "find")], tmp_path, device="cpu", view=Silent())


@pytest.mark.unchecked
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["recall", "--methods", "absolute,nearfar-fox,near-far-fox", "--steps", "1", "--asked",
             "32", "--hidden-size", "8", "--factors", "1,2", "--device", "cpu"]  # fmt: skip
    shown = command.lab([*words, "--out", "new"])
    assert shown.exit_code == 0, shown.exception
    record = json.loads((tmp_path / "new" / "recall.json").read_text())
    rows = {(row["method"], row["task"]): row["accuracy"] for row in record["rows"]}
    assert set(rows) == {(m, t) for m in ("absolute", "near-far-fox") for t in RECALLS}
    assert rows["absolute", "recall"]["2"] is None
    assert 0 <= rows["near-far-fox", "recall"]["2"] <= 1
    assert (tmp_path / "new" / "recall.md").read_text() == markdown(record)
    assert (tmp_path / "new" / "recall.png").stat().st_size > 5000
    for wrong, message in (
        (["--methods", "lemon"], "--methods must be among none, "),
        (["--length", "23"], "--length must be at least 24"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--factors", "2"], "--factors must be 1 and whole numbers above it"),
    ):
        assert message in command.lab(["recall", *wrong]).stderr


@pytest.mark.full
def test_what_is_learned_is_told_from_what_cannot_be():
    """With positions the association is learned, without them later; both see a passkey."""
    found = {}
    for method in ("none", "tisa"):
        for row in run(RecallConfig(steps=500, asked=64), method, torch.device("cpu")):
            found[method, row["task"]] = row["accuracy"]
    assert found["tisa", "recall"]["1"] > 0.95
    assert found["none", "recall"]["1"] < 0.9
    assert found["tisa", "passkey"]["1"] > 0.95
