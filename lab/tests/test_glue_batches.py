"""The same numbers from batches without padding, from halves of them, from several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import tisa.hf
from little_glue import WORDS, make_data, make_model
from tisa_lab.glue.batches import (
    ByLength,
    Marked,
    Packer,
    Padder,
    Share,
    check_packable,
    read_packed,
)
from tisa_lab.glue.cell import Cell, Record
from tisa_lab.glue.training import run
from tisa_lab.sweep import Records

SMALL = dict(steps=6, batch_size=8, learning_rate=1e-3, evaluations=2, calibration_rows=8)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    # 21 rows: the last batch of a pass has 5.
    return make_data(tmp_path_factory.mktemp("glue"), rows=21)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "bert"))


def test_a_model_is_made_to_read_packed_batches_once(model):
    body = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    converted = tisa.hf.convert(body, positions="keep", num_kernels=0, init="zero").eval()
    rows = [{"input_ids": [2, *range(5, 5 + n), 3], "labels": 0} for n in (1, 4, 2)]
    alone = [Packer(converted)([row]) for row in rows]
    for _ in range(2):
        # As two trainers of one model would.
        read_packed(converted)
    batch = Packer(converted)(rows)
    batch.pop("labels")
    for part in alone:
        part.pop("labels")
    with torch.no_grad():
        found = converted(**batch).logits
        expected = torch.cat([converted(**part).logits for part in alone])
    torch.testing.assert_close(found, expected)


def make_other(folder, kind):
    """Write a tiny model of another family beside the same tokenizer."""
    make_model(folder)
    sizes = dict(
        vocab_size=len(WORDS) + 5, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=34, pad_token_id=0,
    )  # fmt: skip
    if kind == "albert":
        model = transformers.AlbertModel(transformers.AlbertConfig(**sizes, embedding_size=8))
    elif kind == "distilbert":
        config = transformers.DistilBertConfig(
            vocab_size=len(WORDS) + 5, dim=16, n_layers=2, n_heads=2, hidden_dim=16, pad_token_id=0,
            max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.DistilBertModel(config)
    else:
        sizes["pad_token_id"] = 1
        model = transformers.RobertaModel(transformers.RobertaConfig(**sizes))
    model.save_pretrained(folder)
    return str(folder)


def compare(one, other, rel=1e-4):
    assert other.tokens == one.tokens
    assert other.steps == one.steps
    for before, after in zip(one.evaluations, other.evaluations, strict=True):
        assert after == pytest.approx(before, rel=rel, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "variant"),
    [
        ("rte", dict(num_kernels=0, init="zero")),
        ("rte", dict(num_kernels=2, positions="replace", fold=True)),
        ("sts-b", dict(num_kernels=2)),
    ],
)
def test_packed_batches_give_the_numbers_of_padded_ones(data_dir, model, task, variant):
    padded = run(Cell.of(model, task, **variant, **SMALL), data_dir=data_dir)
    packed = run(Cell.of(model, task, **variant, **SMALL, batches="packed"), data_dir=data_dir)
    compare(padded, packed)
    assert packed.parameters == padded.parameters


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.full) for kind in ("albert", "roberta")), "distilbert"],
)
def test_other_families_read_packed_batches(data_dir, tmp_path, kind):
    other = make_other(tmp_path / kind, kind)
    for variant in (dict(num_kernels=0, init="zero"), dict(num_kernels=1, positions="replace")):
        cell = dict(**variant, **{**SMALL, "steps": 3, "evaluations": 1})
        padded = run(Cell.of(other, "cola", **cell), data_dir=data_dir)
        packed = run(Cell.of(other, "cola", **cell, batches="packed"), data_dir=data_dir)
        compare(padded, packed)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match=r'must be "padded" for a mpnet; "packed" is for albert'):
        check_packable("mpnet")


@pytest.mark.parametrize(("processes", "pieces"), [(1, 1), (2, 1), (3, 2)])
def test_shares_have_every_row_once(processes, pieces):
    """Also where the last batch has fewer rows than there are shares of it."""
    rows = [{"labels": i} for i in range(25)]
    orders = [ByLength(range(3, 28), 12, seed=3) for _ in range(processes)]
    shares = [Share(order, i, processes, pieces) for i, order in enumerate(orders)]
    marked = Marked(rows)
    alone = ByLength(range(3, 28), 12, seed=3)
    for _ in range(2):
        wanted = list(alone)
        passes = [list(share) for share in shares]
        assert {len(p) for p in passes} == {len(shares[0])} == {3 * pieces}
        for number in range(3):
            batch = wanted[12 * number : 12 * number + 12]
            found = [
                marked[i]["labels"]
                for own in passes
                for part in own[number * pieces : (number + 1) * pieces]
                for i in part
            ]
            assert sorted(label for label in found if label != -100) == sorted(batch)


def test_padding_is_the_tokenizers(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = ["ab", "ab cd ef gh", "cd ef"]
    encoded = tokenizer(texts, texts)
    rows = [
        {name: encoded[name][i] for name in ("input_ids", "token_type_ids")} | {"labels": i}
        for i in range(3)
    ]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        wanted = transformers.DataCollatorWithPadding(tokenizer)([dict(row) for row in rows])
        found = Padder(tokenizer)(rows)
        assert set(found) == set(wanted)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "FSDP2"])
def test_two_processes_give_the_numbers_of_one(data_dir, model, tmp_path, sharded):
    script = tmp_path / "start.py"
    script.write_text(
        "import torch; torch.set_num_threads(1)\nfrom tisa_lab.cli import main\nmain()\n"
    )
    two_start = Path(__file__).parent / "fsdp_glue_process.py" if sharded else script
    options = [
        "glue", model, "--data-dir", str(data_dir), "--tasks", "cola,sts-b", "--device", "cpu",
        "--rows", "baseline; folded, S = 2, fitted", "--seeds", "1", "--steps", "6",
        "--batch-size", "8", "--evaluations", "2", "--learning-rate", "1e-2",
    ]  # fmt: skip
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    lab = Path(__file__).parents[1]
    settings = dict(
        cwd=tmp_path, check=True, timeout=400,
        env={**os.environ, "PYTHONPATH": f"{lab.parent}:{lab}"},
    )  # fmt: skip
    subprocess.run([sys.executable, script, *options, "--out", "one"], **settings)
    subprocess.run([sys.executable, *start, two_start, *options, "--out", "two"], **settings)
    one, two = ({r.cell: r for r in Records(tmp_path / x, Record).all()} for x in ("one", "two"))
    assert set(one) == set(two)
    assert len(one) == 4
    for cell, record in two.items():
        compare(one[cell], record)
        assert record.micro_batch_size == 4
        assert record.surroundings["processes"] == 2
