"""Packed batches of a fused T5: each example is what it is alone, and nothing is padding."""

import pytest
import torch
import transformers

import tisa
from fused_kinds import ENCODERS, PAIRS, assert_close, stock
from test_fused_t5 import Largest

LENGTHS = ((11, 5), (1, 9), (23, 1), (8, 8))


def examples(with_decoder, ignored=False):
    generator = torch.Generator().manual_seed(4)
    made = []
    for length, targets in LENGTHS:
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        labels = torch.randint(3, 60, (targets,), generator=generator).tolist()
        if not with_decoder:
            labels = [i % 3 for i in ids]
        if ignored and len(labels) > 4:
            labels[2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def padded(given):
    """Return the batch that stock code is given."""
    length = max(len(e["input_ids"]) for e in given)
    targets = max(len(e["labels"]) for e in given)
    rows = [e["input_ids"] + [0] * (length - len(e["input_ids"])) for e in given]
    masks = [[1] * len(e["input_ids"]) + [0] * (length - len(e["input_ids"])) for e in given]
    labels = [e["labels"] + [-100] * (targets - len(e["labels"])) for e in given]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(masks),
        "labels": torch.tensor(labels),
    }


def gradients_of(loss, model):
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", [*PAIRS, "t5 tokens"])
def test_loss_and_gradients_are_those_of_padded_examples(kind, ignored):
    model = stock(kind)
    fused = tisa.hf.fuse(stock(kind))
    given = examples(kind in PAIRS, ignored)
    theirs = model(**padded(given))
    ours = fused(**tisa.hf.PackedCollator(fused)(given))
    # Switch's loss has a term of how evenly its experts are used, padding included.
    if kind == "switch":
        logits = ours.logits[0].split([len(e["labels"]) for e in given])
        for row, (one, example) in enumerate(zip(logits, given, strict=True)):
            assert_close(one, theirs.logits[row, : len(example["labels"])])
        return
    assert_close(ours.loss, theirs.loss)
    found, expected = gradients_of(ours.loss, fused), gradients_of(theirs.loss, model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, name)


@pytest.mark.parametrize("kind", ["t5 encoder", "umt5 encoder"])
def test_an_encoders_states_are_those_of_each_example_alone(kind):
    model = stock(kind)
    fused = tisa.hf.fuse(stock(kind))
    given = [{"input_ids": e["input_ids"]} for e in examples(False)]
    packed = fused(**tisa.hf.PackedCollator(fused)(given)).last_hidden_state[0]
    for one, example in zip(packed.split([n for n, _ in LENGTHS]), given, strict=True):
        alone = model(input_ids=torch.tensor([example["input_ids"]])).last_hidden_state[0]
        assert_close(one, alone)


@pytest.mark.parametrize("kind", ["t5", "t5 encoder"])
def test_weights_on_request_are_none_across_examples(kind):
    fused = tisa.hf.fuse(stock(kind))
    batch = tisa.hf.PackedCollator(fused)(examples(kind in PAIRS))
    batch.pop("labels", None) if kind in ENCODERS else None
    plain = fused(**batch)[0]
    asked = fused(**batch, output_attentions=True)
    assert_close(asked[0], plain)
    weights = asked.attentions if kind in ENCODERS else asked.cross_attentions
    ends = {side: batch[f"cu_seq_lens_{side}"].tolist() for side in "kq"}
    rows = ends["k" if kind in ENCODERS else "q"]
    first = weights[0][0, :, : rows[1]]
    assert first[..., ends["k"][1] :].abs().max() == 0
    assert_close(first.sum(-1), torch.ones_like(first.sum(-1)))


def test_padding_is_left_out_and_tensors_are_taken():
    model = stock("t5")
    given = examples(True)
    plain = tisa.hf.PackedCollator(model)(given)
    dressed = [
        {
            "input_ids": torch.tensor([0, 0, *e["input_ids"], 0]),
            "attention_mask": torch.tensor([0, 0, *[1] * len(e["input_ids"]), 0]),
            "labels": torch.tensor(e["labels"]),
        }
        for e in given
    ]
    found = tisa.hf.PackedCollator(model.config)(dressed)
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), torch.as_tensor(value))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("kind", ["t5", "t5 tokens"])
def test_trainers_take_the_collator(kind, tmp_path):
    names = ("Seq2SeqTrainer", "Seq2SeqTrainingArguments")
    if kind in ENCODERS:
        names = ("Trainer", "TrainingArguments")
    trainer_class, arguments = (getattr(transformers, name) for name in names)
    fused = tisa.hf.fuse(stock(kind, torch.float32))
    trainer = trainer_class(
        fused,
        arguments(
            tmp_path, max_steps=12, learning_rate=1e-2, per_device_train_batch_size=4,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=examples(kind in PAIRS) * 4,
        data_collator=tisa.hf.PackedCollator(fused),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    # With padding it evaluates and generates as ever.
    ids = torch.tensor([examples(True)[0]["input_ids"]])
    if kind == "t5":
        assert fused.generate(ids, max_new_tokens=4).shape[1] <= 5


@pytest.mark.unchecked
def test_nothing_is_as_large_as_the_square_of_the_row():
    fused = tisa.hf.fuse(stock("t5", torch.float32))
    generator = torch.Generator().manual_seed(5)
    given = [
        {name: torch.randint(3, 60, (96,), generator=generator) for name in ("input_ids", "labels")}
        for _ in range(16)
    ]
    batch = tisa.hf.PackedCollator(fused)(given)
    with Largest() as seen:
        fused(**batch).loss.backward()
    assert seen.largest < (16 * 96) ** 2 / 2


def test_what_the_collator_refuses():
    model = stock("t5")
    collate = tisa.hf.PackedCollator(model)
    with pytest.raises(ValueError, match="example 0 must have input_ids"):
        collate([{"input_ids": [3], "labels": [4], "text": "a"}])
    with pytest.raises(ValueError, match="needs labels in every example"):
        collate([{"input_ids": [3]}])
    with pytest.raises(ValueError, match="needs examples"):
        collate([])
    with pytest.raises(ValueError, match="example 1 has no tokens"):
        collate([{"input_ids": [3], "labels": [4]}, {"input_ids": [], "labels": [4]}])
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        tisa.hf.PackedCollator(model)


def test_what_a_packed_call_refuses():
    fused = tisa.hf.fuse(stock("t5"))
    batch = tisa.hf.PackedCollator(fused)(examples(True))
    with pytest.raises(ValueError, match="one row of tokens and no attention_mask"):
        fused(**batch, attention_mask=(batch["input_ids"] > 5).long())
    with pytest.raises(ValueError, match="belong together"):
        fused(**{k: v for k, v in batch.items() if not k.endswith("_q")})
