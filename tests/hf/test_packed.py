"""Packed sequences whose ends are told: each is read as if it were alone."""

import pytest
import torch
import transformers

import tisa.hf


@pytest.mark.parametrize("implementation", ["tisa", "eager", "sdpa"])
@pytest.mark.parametrize("positions", ["keep", "replace"])
def test_told_ends_are_those_of_restarting_positions(implementation, positions):
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = tisa.hf.convert(
        transformers.BertModel(config).eval(), num_kernels=2, positions=positions, fold=False
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
