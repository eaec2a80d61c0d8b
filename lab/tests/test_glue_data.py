"""Official files of all eight tasks, what is wrong with others, batches by length, metrics."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from little_glue import make_data, write
from tisa_lab.glue.batches import ByLength
from tisa_lab.glue.tasks import TASKS, Example, read, score, task_named

# A row of each official file, by its published header, and what must be read from it.
LONG = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse",
        "sentence1_parse", "sentence2_parse", "sentence1", "sentence2"]  # fmt: skip
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1",
        "sentence2", "score"]  # fmt: skip
OFFICIAL = {
    "sst-2": (["sentence", "label"], ['a "bare quote ', "1"], ('a "bare quote ',), 1),
    "mnli": ([*LONG, "label1", "gold_label"], [*"01234567", "A", "B", "neutral", "contradiction"],
             ("A", "B"), 2),
    "mnli-10k": (["index", "sentence1", "sentence2", "gold_label"], ["0", "A", "B", "entailment"],
                 ("A", "B"), 0),
    "qqp": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
            ["7", "1", "2", "A?", "B?", "1"], ("A?", "B?"), 1),
    "sts-b": (STSB, [*"0123456", "A", "B", "3.250"], ("A", "B"), 3.25),
    "cola": (None, ["gj04", "0", "*", "They 's."], ("They 's.",), 0),
    "mrpc": (["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
             ["1", "70", "71", "A", "B"], ("A", "B"), 1),
    "qnli": (["index", "question", "sentence", "label"], ["0", "A?", "B", "not_entailment"],
             ("A?", "B"), 1),
    "rte": (["index", "sentence1", "sentence2", "label"], ["0", "A", "B", "entailment"],
            ("A", "B"), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_the_official_files_are_read(tmp_path, name):
    header, row, texts, label = OFFICIAL[name]
    task = task_named(name)
    for file in (task.train, *(file for _, file, _ in task.dev)):
        write(tmp_path / task.folder / file, [row, row], header)
    data = read(task, tmp_path)
    assert data.train == [Example(texts, label)] * 2
    assert data == read(task, tmp_path / task.folder)
    assert set(data.dev) == ({"", "_mismatched"} if name == "mnli" else {""})


def test_only_qqp_may_have_rows_that_end_early(tmp_path):
    header, row, *_ = OFFICIAL["qqp"]
    for file in ("train.tsv", "dev.tsv"):
        write(tmp_path / "QQP" / file, [row, row[:4], row], header)
    data = read(task_named("qqp"), tmp_path)
    assert (len(data.train), data.left_out) == (2, 2)


BROKEN = {
    "no rows": (b"index\tsentence1\tsentence2\tlabel\n", "expected rows of RTE, got none"),
    "empty": (b" \n", "the file is empty"),
    "columns": (b"index\tsentence1\tlabel\n0\tA\tentailment\n", "sentence2 is missing"),
    "row": (b"index\tsentence1\tsentence2\tlabel\n0\tA\tentailment\n",
            "line 2: expected 4 columns between tabs, got 3"),
    "label": (b"index\tsentence1\tsentence2\tlabel\n0\tA\tB\tmaybe\n",
              "line 2: expected a label among entailment, not_entailment, got 'maybe'"),
    "encoding": ("index\tsentence1\tsentence2\tlabel\n0\té\tB\tentailment\n".encode("latin-1"),
                 "expected UTF-8, got the byte 0xe9"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("file", ["train.tsv", "dev.tsv"])
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, file):
    content, message = BROKEN[name]
    make_data(tmp_path)
    (tmp_path / "RTE" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read(task_named("rte"), tmp_path)
    assert file in str(raised.value)


@pytest.mark.parametrize("wrong", ["5.1", "nan", "high", "-1"])
def test_a_score_lies_in_its_range(tmp_path, wrong):
    make_data(tmp_path)
    path = tmp_path / "STS-B" / "train.tsv"
    path.write_text(path.read_text().replace("\t0.000\n", f"\t{wrong}\n"))
    with pytest.raises(ValueError, match=f"between 0 and 5, got '{wrong}'"):
        read(task_named("sts-b"), tmp_path)


def test_unknown_tasks_and_missing_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must be one of sst-2, mnli, .* got 'wnli'"):
        task_named("wnli")
    with pytest.raises(FileNotFoundError, match=r"no RTE/train.tsv in"):
        read(task_named("rte"), tmp_path)
    make_data(tmp_path)
    (tmp_path / "RTE" / "dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"but not dev\.tsv"):
        read(task_named("rte"), tmp_path)
    with pytest.raises(ValueError, match="MNLI-10k is not on the hub"):
        read(task_named("mnli-10k"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="tisa-lab"):
        read(task_named("rte"))


class Split(list):
    column_names = ("sentence1", "sentence2", "label", "idx")


def test_the_hub_gives_the_same_rows(tmp_path, monkeypatch):
    """The hub's rows as `datasets` has them; the classes' order is that of its numbers."""
    local = read(task_named("rte"), make_data(tmp_path))

    def load_dataset(path, name):
        assert (path, name) == ("nyu-mll/glue", "rte")
        return {
            split: Split({"sentence1": e.texts[0], "sentence2": e.texts[1], "label": int(e.label)}
                         for e in rows)
            for split, rows in (("train", local.train), ("validation", local.dev[""]))
        }  # fmt: skip

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = read(task_named("rte"))
    assert found == local
    assert found.fingerprint() == local.fingerprint()
    monkeypatch.setattr(Split, "column_names", ("premise", "label"))
    with pytest.raises(ValueError, match="expected a column sentence1, sentence2"):
        read(task_named("rte"))


def test_the_fingerprint_changes_with_any_row(tmp_path):
    data = read(task_named("cola"), make_data(tmp_path))
    changed = data._replace(train=[data.train[0]._replace(label=1.0), *data.train[1:]])
    moved = data._replace(train=data.train[:-1], dev={"": [data.train[-1], *data.dev[""]]})
    assert len({d.fingerprint() for d in (data, changed, moved)}) == 3


def test_batches_are_of_similar_length_and_hold_every_row_once():
    lengths = np.random.default_rng(0).integers(3, 60, 1003).tolist()
    sampler = ByLength(lengths, 16, seed=1)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(1003))
    assert first != second
    again = ByLength(lengths, 16, seed=1)
    assert [list(again), list(again)] == [first, second]

    def padded(order):
        batches = [order[i : i + 16] for i in range(0, len(order), 16)]
        return sum(len(b) * max(lengths[i] for i in b) for b in batches) / sum(lengths)

    assert padded(first) < 1.08 < 1.6 < padded(list(range(1003)))
    longest = [max(lengths[i] for i in first[j : j + 16]) for j in range(0, 992, 16)]
    # Shuffled: long batches do not all stand at one end.
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.4
    assert sorted(ByLength([5, 3], 16, seed=0)) == [0, 1]


def test_metrics_are_those_of_glue():
    logits = np.array([[2.0, 1.0], [0.0, 3.0], [0.5, 1.0], [4.0, 0.0]])
    labels = np.array([0, 1, 0, 1])
    # One true positive, one false positive, one false negative, one true negative.
    assert score(task_named("cola"), logits, labels) == {"matthews": 0.0, "accuracy": 50.0}
    assert score(task_named("mrpc"), logits, labels) == {"f1": 50.0, "accuracy": 50.0}
    assert score(task_named("rte"), logits, np.array([0, 1, 1, 1])) == {"accuracy": 75.0}
    values, wanted = np.array([[1.0], [2.0], [9.0]]), np.array([1.0, 2.0, 3.0])
    found = score(task_named("sts-b"), values, wanted)
    assert found["spearman"] == pytest.approx(100.0)
    assert found["pearson"] == pytest.approx(100 * np.corrcoef(values[:, 0], wanted)[0, 1])
    same = score(task_named("sts-b"), np.ones((3, 1)), wanted)
    assert same == {"pearson": 0.0, "spearman": 0.0}
