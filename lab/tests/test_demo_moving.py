"""The phrase of the demo's first screen: attention inside it, against the formula in float64."""

from types import SimpleNamespace

import pytest
import torch

import tisa.hf
from tisa_lab.demo.moving import PHRASE, SENTENCE, inside, move, moved

PLACES, HEADS, WIDTH = len(SENTENCE) - 1, 2, 8


def bert(places=64):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=HEADS * WIDTH, num_hidden_layers=2, num_attention_heads=HEADS)
    config = BertConfig(**sizes, intermediate_size=8, vocab_size=40, max_position_embeddings=places)
    model = BertModel(config).eval()
    for name, weight in model.named_parameters():
        if "embeddings" in name or "query" in name or "key" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model


class Words:
    """A tokenizer with a token for each word, and two for "man"."""

    cls_token_id, sep_token_id = 1, 2
    known = sorted({*PHRASE, *SENTENCE})

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        (word,) = text.split()
        token = 3 + self.known.index(word)
        return SimpleNamespace(input_ids=[token, 39] if word == "man" else [token])


def by_formula(model, place):
    """Attention inside the phrase at a place, (heads, 5, 5), from weights of the first layer."""
    words = [*SENTENCE[:place], *PHRASE, *SENTENCE[place:]]
    ids, owner = [1], [-1]
    for at, word in enumerate(words):
        pieces = Words()(word, add_special_tokens=False).input_ids
        ids += pieces
        owner += [at - place if place <= at < place + 5 else -1] * len(pieces)
    ids, owner = torch.tensor([*ids, 2]), torch.tensor([*owner, -1])
    table, layer = model.embeddings, model.encoder.layer[0].attention.self
    x = table.word_embeddings.weight[ids] + table.token_type_embeddings.weight[0]
    x = x + table.position_embeddings.weight[: len(ids)]
    x = torch.nn.functional.layer_norm(
        x, x.shape[-1:], table.LayerNorm.weight, table.LayerNorm.bias, table.LayerNorm.eps
    )
    q, k = (
        (x @ part.weight.T + part.bias).unflatten(-1, (HEADS, WIDTH))
        for part in (layer.query, layer.key)
    )
    odds = (torch.einsum("ihd,jhd->hij", q, k) / WIDTH**0.5).exp()
    found = torch.zeros(HEADS, 5, 5, dtype=x.dtype)
    for i in range(5):
        rows = odds[:, owner == i][..., owner >= 0]
        rows = (rows / rows.sum(-1, keepdim=True)).mean(1)
        for j in range(5):
            found[:, i, j] = rows[:, owner[owner >= 0] == j].sum(-1)
    return found


def test_attention_inside_the_phrase_is_that_of_the_formula():
    model = bert()
    found = inside(model, Words())
    assert found.shape == (PLACES, HEADS, 5, 5)
    assert model.config._attn_implementation == bert().config._attn_implementation
    expected = [by_formula(model.double(), place) for place in range(1, PLACES + 1)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_it_moves_with_a_table_and_stays_with_kernels():
    model = bert()
    texts = [list(range(3, 3 + n)) for n in (9, 17)]
    converted = tisa.hf.convert(model, init="reference", calibration=texts)
    found = move(model, converted, Words())
    table, kernels = (torch.tensor(found["attention"][name]) for name in ("table", "tisa"))
    assert table.shape == kernels.shape == (PLACES, 5, 5)
    torch.testing.assert_close(kernels, kernels[:1].expand_as(kernels), rtol=0, atol=1.01e-4)
    torch.testing.assert_close(table.sum(-1), torch.ones(PLACES, 5), rtol=0, atol=3e-4)
    # The head is the one that moves most, and the mean is over both.
    every = inside(model, Words())
    shares = (every - every[:1]).abs().sum(-1).mean((0, 2)) / 2
    assert found["head"] - 1 == int(shares.argmax())
    assert found["mean"]["table"] == pytest.approx(float(shares.mean()), abs=1e-6)
    assert found["mean"]["table"] > 0.02 > 1e-5 > found["mean"]["tisa"]
    assert moved(every)[0].abs().max() == 0


def test_a_model_that_is_too_short_has_no_phrase():
    model = bert(places=len(SENTENCE) + len(PHRASE) + 2)  # one token fewer than the input has
    assert move(model, model, Words()) is None
