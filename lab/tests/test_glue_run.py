"""One cell of Table 3 through the whole path, with a tiny model and made-up tasks."""

import dataclasses
import json

import pytest
import torch
import transformers

from little_glue import make_data, make_model
from tisa_lab.glue import starts, training
from tisa_lab.glue.cell import Cell, Record, grid
from tisa_lab.glue.table3 import plan
from tisa_lab.glue.training import run

SMALL = dict(steps=6, batch_size=8, learning_rate=1e-3, evaluations=2, calibration_rows=8)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "bert"))


@pytest.mark.parametrize(
    ("task", "variant", "metric"),
    [
        ("cola", dict(num_kernels=0, init="zero"), "matthews"),
        ("cola", dict(num_kernels=2, positions="replace", fold=True, init="fit"), "matthews"),
        ("rte", dict(num_kernels=2, positions="replace", fold=True, init="fit", frozen=True),
         "accuracy"),
        pytest.param("rte", dict(num_kernels=0, positions="replace", init="zero"), "accuracy",
                     marks=pytest.mark.full),
        ("sts-b", dict(num_kernels=3), "pearson"),
        ("sts-b", dict(num_kernels=0, positions="replace", init="zero", fold=True), "pearson"),
    ],
)  # fmt: skip
def test_the_same_seed_gives_the_same_numbers(data_dir, model, task, variant, metric):
    cell = Cell.of(model, task, **variant, **SMALL)
    seen = []
    first = run(cell, data_dir=data_dir, progress=lambda *at: seen.append(at))
    torch.manual_seed(12345)
    assert run(cell, data_dir=data_dir).numbers() == first.numbers()
    assert seen == [(i, 6) for i in range(6)]
    assert [e["step"] for e in first.evaluations] == [3, 6]
    assert first.metrics[metric] == first.evaluations[-1][metric]
    assert first.rows == {"train": 24, "dev": 10}
    assert first.surroundings["transformers"] == transformers.__version__
    assert {"commit", "device", "torch", "date", "uncommitted_changes"} <= set(first.surroundings)
    assert Record.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    scores = first.parameters["scores"]
    folded = 3 * 16 if cell.variant.fold else 0
    assert scores == 3 * cell.variant.num_kernels * 2 * 2 + folded
    fixed = 3 * cell.variant.num_kernels * 2 * 2 if cell.variant.frozen else 0
    assert first.parameters["trained"] == first.parameters["all"] - fixed


def test_another_seed_gives_other_numbers(data_dir, model):
    cell = Cell.of(model, "cola", **{**SMALL, "steps": 1})
    other = dataclasses.replace(cell, seed=1)
    assert run(cell, data_dir=data_dir).metrics != run(other, data_dir=data_dir).metrics


def test_scores_have_a_group_of_their_own(data_dir, model, monkeypatch):
    seen = []
    made = training.CellTrainer.create_optimizer

    def create_optimizer(self, *arguments):
        seen.append(made(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(training.CellTrainer, "create_optimizer", create_optimizer)
    cell = Cell.of(model, "cola", num_kernels=2, **{**SMALL, "steps": 1}, scores_learning_rate=0.5)
    run(cell, data_dir=data_dir)
    *weights, scores = seen[0].param_groups
    assert scores["initial_lr"] == 0.5
    assert scores["weight_decay"] == 0.0
    assert {p.dtype for p in scores["params"]} == {torch.float32}
    assert [group["initial_lr"] for group in weights] == [1e-3, 1e-3]
    assert weights[0]["weight_decay"] == 0.01


def test_out_of_memory_halves_the_batch_and_says_so(data_dir, model, monkeypatch):
    whole = run(Cell.of(model, "cola", **SMALL), data_dir=data_dir)
    step = training.CellTrainer.training_step

    def too_large(self, model, inputs, *more, **named):
        if len(inputs["labels"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, model, inputs, *more, **named)

    monkeypatch.setattr(training.CellTrainer, "training_step", too_large)
    halved = run(Cell.of(model, "cola", **SMALL), data_dir=data_dir)
    assert (whole.micro_batch_size, halved.micro_batch_size) == (8, 4)
    assert halved.steps == whole.steps == 6
    # Steps are the same steps: their rows, their rate; sums in another order.
    assert halved.tokens == whole.tokens
    assert halved.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-3)

    def always(self, *arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training.CellTrainer, "training_step", always)
    with pytest.raises(torch.OutOfMemoryError):
        run(Cell.of(model, "cola", **{**SMALL, "batch_size": 1}), data_dir=data_dir)


def test_what_cannot_be_run_is_said(data_dir, model, tmp_path):
    with pytest.raises(ValueError, match="must be one of sst-2"):
        Cell.of(model, "wnli")
    with pytest.raises(ValueError, match='"fit" and fold are for positions="replace"'):
        Cell.of(model, "rte", init="fit")
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        Cell.of(model, "rte", batch_size=0)
    with pytest.raises(ValueError, match="epochs must be a number above 0, got inf"):
        Cell.of(model, "rte", epochs=float("inf"))
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    make_model(tmp_path / "vit")
    config.save_pretrained(tmp_path / "vit")
    picture = Cell.of(str(tmp_path / "vit"), "rte")
    with pytest.raises(ValueError, match="a vit, for which transformers has no classification"):
        starts.stock_model(picture)
    # And before anything is run.
    with pytest.raises(ValueError, match="a vit, for which transformers has no classification"):
        plan([picture], [], data_dir)
    weights = make_model(tmp_path / "torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"torn.*is truncated .*; download it again"):
        starts.stock_model(Cell.of(str(weights.parent), "rte"))
    cell = Cell.of(model, "sts-b", **{**SMALL, "learning_rate": 1e30})
    with pytest.raises((ArithmeticError, ValueError), match="learning_rate"):
        run(cell, data_dir=data_dir)


def test_the_grid_has_every_cell_once_and_none_without_meaning():
    cells = grid(
        ["m"], ["cola"], init=("reference", "fit"), fold=(False, True), frozen=(False, True),
        seeds=(0,),
    )  # fmt: skip
    assert len({c.key for c in cells}) == len(cells)
    names = sorted(c.variant.label for c in cells if c.variant.num_kernels in (0, 5))
    assert names == [
        "S = 5", "baseline", "folded", "folded, S = 5", "folded, S = 5, fitted",
        "folded, S = 5, fitted, frozen", "zeroed", "zeroed, S = 5", "zeroed, S = 5, fitted",
        "zeroed, S = 5, fitted, frozen",
    ]  # fmt: skip
    assert len(cells) == 2 * 1 + 1 + 3 * 7
    # The published recipe, and steps that are whole again after being a share.
    assert (cells[0].recipe.steps, round(cells[0].recipe.warmup * 5336)) == (5336, 320)
    assert grid(["m"], ["cola"], epochs=2.0)[0].recipe.steps is None
    seeds = [c.seed for c in grid(["m"], ["cola", "rte"], seeds=(3, 4))]
    assert seeds == sorted(seeds)


def test_rows_are_named_as_in_the_table():
    """Every cell of the largest grid from the name of its row."""
    cells = grid(
        ["m"], ["cola"], init=("reference", "zero", "fit"), fold=(False, True),
        frozen=(False, True), distil_steps=(0, 30), seeds=(0,),
    )  # fmt: skip
    assert grid(["m"], ["cola"], rows=[c.variant.label for c in cells], seeds=(0,)) == cells
    for wrong in (
        "",
        "S = 0",
        "S = 5, zeroed",
        "zeroed S = 5",
        "baseline, S = 5",
        "folded, fitted",
    ):
        with pytest.raises(ValueError, match="first column of the table"):
            grid(["m"], ["cola"], rows=[wrong])
    with pytest.raises(ValueError, match='distil_steps are for init="fit"'):
        grid(["m"], ["cola"], rows=["zeroed, S = 5, distilled 30"])


def test_a_line_that_is_no_record_is_refused(data_dir, model):
    with pytest.raises(ValueError, match="expected a record"):
        Record.from_dict({})
    record = run(Cell.of(model, "cola", **{**SMALL, "steps": 1}), data_dir=data_dir)
    changed = record.to_dict()
    changed["cell"]["seed"] = 9
    with pytest.raises(ValueError, match="changed by hand"):
        Record.from_dict(changed)
