"""`tisa verify`: what it prints, and how it leaves."""

import json

import command
from tisa import store


def test_whole_damaged_repaired(tmp_path):
    path = tmp_path / "out" / "records.jsonl"
    store.Lines(path).append({"n": 1}, {"n": 2})
    answer = command.tisa_(["verify", tmp_path / "out"])
    assert (answer.exit_code, answer.stdout.splitlines()[-1]) == (0, "Whole.")
    path.write_bytes(path.read_bytes().replace(b'"n": 2', b'"n": 3'))
    answer = command.tisa_(["verify", tmp_path / "out"])
    assert answer.exit_code == 1
    assert "records.jsonl, line 2, bytes " in answer.stdout
    assert "--repair makes good what can be" in answer.stdout
    found = json.loads(command.tisa_(["verify", tmp_path / "out", "--json"]).stdout)
    assert not found["whole"]
    assert found["found"][0]["repair"] == "take out"
    answer = command.tisa_(["verify", tmp_path / "out", "--repair", "--json"])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["repaired"]
    assert store.Lines(path).read()[0] == [{"n": 1}]


def test_what_is_not_there_is_a_mistake(tmp_path):
    answer = command.tisa_(["verify", tmp_path / "nowhere"])
    assert answer.exit_code == 2
    assert "is not there; name a folder or a file" in answer.stderr
