"""Packed sequences whose ends are told: each is read as if it were alone."""

import pytest
import torch
import transformers

import tisa.hf
from tiny import implementations, logits, original, shake


@pytest.mark.parametrize("implementation", ["tisa", "eager", "sdpa"])
@pytest.mark.parametrize("positions", ["keep", "replace"])
def test_told_ends_are_those_of_restarting_positions(implementation, positions):
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = tisa.hf.convert(
        transformers.BertModel(config).eval(),
        num_kernels=2,
        positions=positions,
        init="reference",
        fold=False,
    )
    model.set_attn_implementation(implementation)
    lengths = [5, 1, 7]
    parts = [torch.randint(5, 40, (1, n)) for n in lengths]
    alone = torch.cat([model(input_ids=part).last_hidden_state for part in parts], 1)
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    places = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    given = dict(input_ids=torch.cat(parts, 1), position_ids=places)
    together = model(**given, tisa_packed=(ends, 7)).last_hidden_state
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, model(**given).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_told_ends_beside_a_mask(name):
    model = shake(tisa.hf.convert(original(name).base_model, positions="keep", init="zero"))
    ids = torch.randint(5, 60, (1, 13), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(n) for n in (5, 1, 7)]).unsqueeze(0)
    mask = torch.ones_like(ids)
    mask[0, 3:5] = 0
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    for more in ({}, {"attention_mask": mask}):
        given = dict(input_ids=ids, position_ids=places + 2 * (name == "mpnet"), **more)
        real = more.get("attention_mask", torch.ones_like(ids)).bool()
        model.set_attn_implementation("eager")
        wanted = model(**given)[0][real]
        for implementation in implementations(name):
            model.set_attn_implementation(implementation)
            for told in ({}, {"tisa_packed": (ends, 7)}):
                found = model(**given, **told)[0][real]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_of_pairs_says_who_sees_whom(name, kind):
    """Two branches after one prefix, as trees are decoded: positions repeat, nothing is packed."""
    stock = original(name)
    model = tisa.hf.convert(stock, positions="keep", init="zero")
    ids = torch.randint(5, 60, (1, 7), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    seen[5:, 3:5] = False
    mask = seen if kind == torch.bool else torch.where(seen, 0.0, torch.finfo(kind).min)
    given = dict(
        input_ids=ids,
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 3, 4]]),
        attention_mask=mask[None, None],
    )
    stock.set_attn_implementation("sdpa")
    wanted = logits(stock, **given)
    for implementation in implementations(name) if kind == torch.float32 else ("sdpa", "tisa"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(logits(model, **given), wanted, rtol=1e-4, atol=1e-4)
