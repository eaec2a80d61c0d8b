"""Models in a stack do what they do alone: outputs, gradients, steps of the optimiser."""

import pytest
import torch
import transformers

import tisa.hf
from tiny import inputs, original, shake, token_lists
from tisa.parameters import is_score, parameter_groups, weight_groups
from tisa_lab.glue.stack import Stack

# float32; sums in another order.
BUDGET = 2e-5
CLASSES = {
    "bert": transformers.BertForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "electra": transformers.ElectraForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "albert": transformers.AlbertForSequenceClassification,
}


def classifier(name, seed=0, dropout=0.0):
    config = original(name).config
    config.num_labels = 3
    for part in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout",
                 "attention_dropout", "classifier_dropout", "classifier_dropout_prob",
                 "seq_classif_dropout"):  # fmt: skip
        if hasattr(config, part):
            setattr(config, part, dropout)
    torch.manual_seed(seed)
    model = CLASSES[name](config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(4.0)
    return model


def variants(name):
    """Models as different as cells are: two heads, with and without positions, kernels, folds."""
    ends = dict(calibration=token_lists(), tokenizer=None)
    first, second = classifier(name), classifier(name, seed=1)
    made = [
        first,
        shake(tisa.hf.convert(first, positions="keep", num_kernels=3)),
        tisa.hf.convert(second, num_kernels=0, positions="replace", fold=False, init="zero"),
        shake(
            tisa.hf.convert(second, num_kernels=1, positions="replace", init="reference", **ends)
        ),
        shake(tisa.hf.convert(first, num_kernels=2, init="reference", fold=False)),
    ]
    for parameter_name, p in made[-1].named_parameters():
        # Frozen kernels.
        p.requires_grad_("offset_scores" not in parameter_name)
    return made


def stacked(models, **settings):
    stack = Stack(models[0], len(models), num_kernels=3, fold=True, **settings)
    for number, model in enumerate(models):
        stack.put(number, model)
    return stack


def groups_of(model, **rates):
    for name, p in model.named_parameters():
        if "offset_scores" in name and p.numel() == 0:
            p.requires_grad_(False)
    scored = any(is_score(n) for n, p in model.named_parameters() if p.requires_grad)
    return (parameter_groups if scored else weight_groups)(model, **rates)


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_in_a_stack_trains_as_it_does_alone(name):
    """Three steps on rows of their own, clipped by their own norms; the weights afterwards."""
    models = variants(name)
    kept = torch.tensor([0, 1, 2, 3, *range(6, 60)])
    stack = stacked(models, kept=kept)
    rates = dict(lr=1e-2, weight_decay=0.1)
    # Of a gradient that is all rounding (of the keys' biases), Adam must not make whole steps.
    together = torch.optim.AdamW(stack.groups(**rates), eps=1e-3)
    alone = [torch.optim.AdamW(groups_of(model, **rates), eps=1e-3) for model in models]
    labels = torch.tensor([0, 1, 2])
    parts = [inputs() for _ in models]
    for number, part in enumerate(parts):
        # Other rows for each, and other padding.
        inside = (part["attention_mask"] == 1) & (part["input_ids"] > 3)
        part["input_ids"][inside] = (part["input_ids"][inside] + 7 * number) % 50 + 6
        part["input_ids"][2, 11 - number :] = 1
        part["attention_mask"][2, 11 - number :] = 0
    ids = torch.stack([part["input_ids"] for part in parts])
    mask = torch.stack([part["attention_mask"].bool() for part in parts])
    for model in (*models, stack):
        model.train()
    for _ in range(3):
        found = stack(ids, mask)
        loss = torch.nn.functional.cross_entropy
        sum(loss(found[i], labels) for i in range(len(models))).backward()
        norms = stack.clip_gradients(0.5)
        together.step()
        together.zero_grad()
        for number, (model, optimizer, part) in enumerate(zip(models, alone, parts, strict=True)):
            wanted = model(**part).logits
            torch.testing.assert_close(found[number], wanted, rtol=BUDGET, atol=BUDGET)
            loss(wanted, labels).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(norms[number], norm, rtol=1e-4, atol=0)
            optimizer.step()
            optimizer.zero_grad()
    assert len({round(float(norm), 4) for norm in norms}) == len(models)
    # What came out is what `put` would make of the single models now.
    again = stacked(models, kept=kept)
    for (parameter, mine), (_, wanted) in zip(
        stack.named_parameters(), again.named_parameters(), strict=True
    ):
        # Adam steps by up to 1e-2; without AVX-512 gradients of nearly 0 differ by 1.3e-5 after it.
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=3e-5, msg=parameter)


def test_rows_that_all_models_share_are_given_once():
    models = variants("bert")
    stack = stacked(models).eval()
    part = inputs()
    ids, mask = part["input_ids"].unsqueeze(0), part["attention_mask"].bool().unsqueeze(0)
    with torch.no_grad():
        once = stack(ids, mask)
        each = stack(ids.expand(5, -1, -1), mask.expand(5, -1, -1))
        assert torch.allclose(once, each, atol=1e-6)
        whole = inputs(padded=False)["input_ids"].unsqueeze(0)
        assert torch.allclose(stack(whole), stack(whole, torch.ones_like(whole).bool()), atol=1e-6)


def test_dropout_falls_differently_on_every_model_and_row():
    models = [classifier("bert", dropout=0.3) for _ in range(3)]
    stack = stacked(models)
    ids = inputs(1, padded=False)["input_ids"].expand(600, -1)
    with torch.no_grad():
        same = stack.eval()(ids[None, :2])
        assert torch.allclose(same, same[:1, :1].expand_as(same), atol=1e-6)
        torch.manual_seed(0)
        found = stack.train()(ids.unsqueeze(0))
        alone = models[0].train()(ids).logits
    assert (found[0] - found[1]).abs().mean() > 0.1 * alone.std()
    # Around the mean that a single model has, and as far.
    assert ((found.mean(1) - alone.mean(0)).abs() < 0.25 * alone.std(0)).all()
    assert (found.std(1) / alone.std(0) - 1).abs().max() < 0.2


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(ValueError, match="it is a gpt2, and these are known: albert, bert"):
        Stack(original("gpt2"), 2, num_kernels=0, fold=False)
    model = classifier("bert")
    model.config.is_decoder = True
    with pytest.raises(ValueError, match="set up as a decoder"):
        Stack(model, 2, num_kernels=0, fold=False)
    model = classifier("bert")
    model.classifier = torch.nn.Bilinear(32, 32, 3)
    with pytest.raises(ValueError, match="a Bilinear has parameters"):
        Stack(model, 2, num_kernels=0, fold=False)
