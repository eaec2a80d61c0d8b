"""A method of one file, written by somebody else, goes through the laboratory as ours do.

Nothing of either package knows of it. Attention, conversion, saving and the contract are in
`tests/positions/` and `tests/hf/`.
"""

import json

import pytest

import command
from little_corpus import SMALL, text
from own_methods import FUNCTION, forget
from tisa.transformer import load
from tisa_lab.criteria import table
from tisa_lab.criteria.settings import Settings
from tisa_lab.pretrain.config import PretrainConfig

FEW = Settings(
    training_length=16, hidden_size=16, draws=2, contents=6, phrase=4, shifts=(1, 5),
    path_lengths=(8, 16), search_steps=3, device="cpu",
)  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The file in the current folder; the class is not known when the test is over."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root.py").write_text(FUNCTION)
    (tmp_path / "corpus.txt").write_text(text(longest=99))
    yield "root.py:Root"
    forget()


def lab(*words):
    done = command.lab([str(word) for word in words])
    assert done.exit_code == 0, done.stderr
    return done


def test_criteria_and_probes(mine):
    found = table.run(FEW, [mine, "none"])
    _, row = found["rows"]
    assert row["method"] == mine
    marks = {name: cell["mark"] for name, cell in row["cells"].items()}
    # It falls with the distance, so no far key can win; every other criterion is that of a curve.
    assert marks == {name: name != "inductive" for name in marks}
    assert found["sources"][mine]["cls"] == "Root"
    words = ["--tasks", "find", "--length", "12", "--factors", "1", "--steps", "2",
             "--hidden-size", "8", "--asked", "32"]  # fmt: skip
    found = json.loads(lab("probes", "--methods", f"{mine}:start=2", *words, "--json").stdout)
    (row,) = found["rows"]
    assert row["method"] == f"{mine}:start=2"
    # One of each head in two layers.
    assert row["positional_parameters"] == 2 * 4


def test_pretraining_goes_on_and_is_read_past_its_length(mine, tmp_path):
    words = ["pretrain", "--data", "corpus.txt", "--valid", "corpus.txt", *SMALL, "--steps", "3"]
    lab(*words, "--position", f"none,{mine}", "--out", "grid")
    folder = tmp_path / "grid" / "root.py-Root-0.01-0"
    record = json.loads((folder / "record.json").read_text())
    assert record["config"]["position"] == mine
    assert record["config"]["position_source"]["file"] == "root.py"
    # Its curves are in the record as those of our functions.
    assert len(record["curves"]["scores"]) == 2
    again = lab(*words, "--position", f"none,{tmp_path}/root.py:Root", "--out", "grid")
    assert "2 runs, 2 of them done before" in again.stderr
    measured = ["extrapolate", folder, "--data", "corpus.txt", "--lengths", "32,64", "--json"]
    forget()
    refused = command.lab([str(word) for word in measured])
    assert refused.exit_code == 2
    assert "made with Root of root.py (SHA-256" in refused.stderr
    found = json.loads(lab(*measured, "--position", mine).stdout)
    (run,) = found["runs"]
    assert run["label"] == mine
    assert all(row["loss"] > 0 for row in run["rows"])
    assert load(folder / "model").config.position.__name__ == "Root"
    # Changed between the beginning of a grid and one of its runs, it is not the method asked for.
    config = PretrainConfig(position=mine)
    before = config.to_dict()["position_source"]
    (tmp_path / "root.py").write_text(FUNCTION + "# soon\n")
    assert config.to_dict()["position_source"] == before
    with pytest.raises(ValueError, match=r"the file of root\.py:Root has changed since this run"):
        config.transformer(300)
    # The other content is another run: its numbers would not be those of the first steps.
    (tmp_path / "root.py").write_text(FUNCTION + "# changed\n")
    other = command.lab([str(w) for w in (*words, "--position", f"none,{mine}", "--out", "grid")])
    assert other.exit_code == 2
    assert "position_source" in other.stderr
