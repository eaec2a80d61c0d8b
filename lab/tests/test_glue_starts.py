"""What cells start from: made once, kept whole, found again elsewhere."""

import errno
import json
import os
import threading

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import command
import tisa.hf
from little_glue import changed, make_data, make_model
from tisa_lab.glue import starts, training
from tisa_lab.glue.cell import Cell, grid
from tisa_lab.glue.training import make_start, run

SMALL = dict(steps=2, batch_size=8, learning_rate=1e-3, evaluations=1, calibration_rows=8)
FITTED = dict(num_kernels=2, positions="replace", init="fit", fold=True)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "bert"))


def files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_a_start_is_made_once_for_all_seeds(data_dir, model, tmp_path, monkeypatch):
    cell = Cell.of(model, "cola", **FITTED, **SMALL)
    alone = run(cell, data_dir=data_dir)
    first = run(cell, data_dir=data_dir, starts=tmp_path)
    (name,) = files(tmp_path)
    assert first.start["key"] == name.removesuffix(".safetensors")
    assert 0 < first.start["cosine"] <= 1
    assert len(first.start["divergence"]) == 2
    monkeypatch.setattr(starts, "fit_scores", None)
    again = run(cell, data_dir=data_dir, starts=tmp_path)
    assert again.start == first.start
    assert again.numbers() == first.numbers() == alone.numbers()
    for other in (dict(seed=1), dict(frozen=True)):
        run(changed(cell, **other), data_dir=data_dir, starts=tmp_path)
    assert files(tmp_path) == [name]


def test_what_matters_is_in_the_key(data_dir, model, tmp_path, monkeypatch):
    cell = Cell.of(model, "cola", **FITTED, **SMALL)
    others = [
        dict(), dict(num_kernels=1), dict(fold=False), dict(task="rte"), dict(calibration_rows=7),
        dict(train_rows=12), dict(max_length=6), dict(distil=1), dict(distil=2),
    ]  # fmt: skip
    touched = transformers.AutoModel.from_pretrained(model)
    with torch.no_grad():
        touched.encoder.layer[1].attention.self.key.weight[0, 0] += 0.01
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "other")
    touched.save_pretrained(tmp_path / "other")
    others.append(dict(model=str(tmp_path / "other")))
    monkeypatch.setattr(starts, "fit_scores", lambda *arguments: [])
    monkeypatch.setattr(tisa.hf, "distil", lambda *arguments, **named: [1.0])
    found = {make_start(changed(cell, **o), tmp_path, data_dir=data_dir)["key"] for o in others}
    assert len(found) == len(others) == len(files(tmp_path))
    assert make_start(Cell.of(model, "cola"), tmp_path, data_dir=data_dir) is None


def test_a_copy_in_float16_elsewhere_has_the_same_start(data_dir, model, tmp_path, monkeypatch):
    cell = Cell.of(model, "cola", **FITTED, **SMALL)
    made = make_start(cell, tmp_path / "starts", data_dir=data_dir)
    copy = tmp_path / "elsewhere"
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(copy)
    transformers.AutoModel.from_pretrained(model, dtype=torch.float16).save_pretrained(copy)
    monkeypatch.setattr(starts, "fit_scores", None)
    moved = changed(cell, model=str(copy))
    found = run(moved, data_dir=data_dir, starts=tmp_path / "starts").start
    assert found == made
    # Where it came from, not where it is used.
    assert found["model"] == model


def test_a_distilled_start_begins_with_the_fitted_one(data_dir, model, tmp_path, monkeypatch):
    cell = Cell.of(model, "cola", **{**FITTED, "fold": False}, **SMALL)
    fitted = make_start(cell, tmp_path, data_dir=data_dir)
    monkeypatch.setattr(starts, "fit_scores", None)
    distilled = changed(cell, distil=20)
    record = run(distilled, data_dir=data_dir, starts=tmp_path)
    assert len(files(tmp_path)) == 2
    assert record.start["cosine"] > fitted["cosine"]
    assert record.start["start"] == "zeroed, S = 2, fitted, distilled 20"
    assert "folded, S = 2, fitted, distilled 20, frozen" in {
        c.variant.label
        for c in grid([model], ["cola"], init=("fit",), fold=(True,), frozen=(True,), kernels=(2,),
                      distil_steps=(0, 20))
    }  # fmt: skip
    monkeypatch.setattr(tisa.hf, "distil", None)
    again = run(distilled, data_dir=data_dir, starts=tmp_path)
    assert again.numbers() == record.numbers()


def test_a_new_field_leaves_the_keys_of_old_records(model):
    assert Cell.of("m", "cola").key == "c16a572ec650b17e"
    assert Cell.of(model, "cola", **FITTED, distil=1).key != Cell.of(model, "cola", **FITTED).key
    with pytest.raises(ValueError, match='distil_steps are for init="fit"'):
        Cell.of("m", "cola", distil=1)


def test_two_at_once_fit_once(data_dir, model, tmp_path, monkeypatch):
    calls = []
    fit = starts.fit_scores

    def counted(*arguments):
        calls.append(threading.get_ident())
        return fit(*arguments)

    # One after another: transformers replaces methods of its own while it loads a model, and two
    # threads (not two processes, as a sweep has) would leave the replacement in place.
    load, alone = starts.stock_model, threading.Lock()

    def loaded(*arguments):
        with alone:
            return load(*arguments)

    monkeypatch.setattr(starts, "stock_model", loaded)
    monkeypatch.setattr(starts, "fit_scores", counted)
    cell = Cell.of(model, "cola", **FITTED, **SMALL)
    found = []

    def make():
        found.append(make_start(cell, tmp_path, data_dir=data_dir))

    both = [threading.Thread(target=make) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(calls) == 1
    assert found[0] == found[1]
    assert transformers.PreTrainedModel.tie_weights.__name__ == "tie_weights"


def test_a_full_disk_leaves_no_half_of_a_file(data_dir, model, tmp_path, monkeypatch):
    cell = Cell.of(model, "cola", **FITTED, **SMALL)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as once:
        once.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="make room for what cells start from"):
            make_start(cell, tmp_path, data_dir=data_dir)
    assert files(tmp_path) == []
    assert not list(tmp_path.glob("*.unfinished"))
    (key,) = {make_start(cell, tmp_path, data_dir=data_dir)["key"] for _ in range(2)}
    (tmp_path / f"{key}.safetensors").write_bytes(b"no start at all")
    with pytest.raises(ValueError, match=r"not a start of `tisa-lab glue` .* remove it"):
        make_start(cell, tmp_path, data_dir=data_dir)


def test_the_command_makes_starts_alone(data_dir, model, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "run", None)
    answer = command.lab(
            ["glue", model, "--tasks", "cola,rte", "--kernels", "0,2", "--positions", "replace",
         "--init", "reference,fit", "--fold", "yes", "--frozen", "no,yes", "--seeds", "2",
         "--data-dir", str(data_dir), "--out", str(tmp_path), "--only-starts"],
    )  # fmt: skip
    assert answer.exit_code == 0, answer.exception
    assert len(files(tmp_path / "starts")) == 2
    assert "2/2 rte folded, S = 2, fitted: " in answer.stdout
    assert not (tmp_path / "records.jsonl").exists()


def test_a_new_head_is_the_one_that_transformers_draws(model):
    cell = Cell.of(model, "cola", seed=3)
    transformers.set_seed(3)
    auto = transformers.AutoModelForSequenceClassification
    expected = auto.from_pretrained(model, num_labels=2, dtype=torch.float32).state_dict()
    found = starts.stock(cell)[1].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("encoder.layer.1.output.dense.weight"), r"lack encoder.layer.1.output|"
         r"lack bert.encoder.layer.1.output"),
        (lambda t: t.clear() or t.update({"other": torch.ones(9999)}), "lack bert.embeddings"),
        (lambda t: t.update({"embeddings.LayerNorm.weight": torch.ones(3)}), "must be of shape"),
    ],
)  # fmt: skip
def test_what_is_new_is_the_head_alone(tmp_path, spoil, words):
    folder = make_model(tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        starts.stock_model(Cell.of(str(folder), "rte"))
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(ValueError, match=r"needs code of its own, which is not run"):
        starts.stock_model(Cell.of(str(folder), "rte"))
