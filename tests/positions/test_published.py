"""Checkpoints as their authors name them: prefixes, layers, and what does not fit."""

import pytest
import torch

import tisa
from tisa.positions import PositionConfig
from tisa.positions.published import from_reference

SMALL = PositionConfig(8, 2, 2, 16)


def shaw(layers):
    kinds = ("relative_positions_keys", "relative_positions_values")
    return {
        f"transformer/layer_{layer}/self_attention/{kind}/embeddings": torch.full((33, 4), layer)
        for layer in layers for kind in kinds
    }  # fmt: skip


def test_layers_stand_in_their_order():
    config = PositionConfig(8, 2, 11, 16)
    position = from_reference("shaw", shaw(range(11)), config)
    assert position.key_table[:, 0, 0, 0].tolist() == list(range(11))


def test_what_has_other_names_is_left_alone():
    state = {"model.bias": torch.ones(1), **{f"layers.{i}.rpe.{name}": torch.full((2, 1, 1), 0.5)
             for i in range(2, 5) for name in ("bias_a", "bias_p")}}  # fmt: skip
    # The authors' module is one, and stands in every layer's file.
    position = from_reference("kerple-log", state, SMALL)
    torch.testing.assert_close(position.scoring[0].r1, torch.full((2,), 0.5))
    paper = tisa.KerpleLog(2)
    paper.read_reference(state)
    torch.testing.assert_close(paper(5), position.scoring[0](5))


def test_transformers_tables_are_theirs_transposed():
    table = torch.randn(32, 2)
    key = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = from_reference("t5", {key: table}, SMALL).scoring[0].bucket_scores
    assert torch.equal(found, table.T)


@pytest.mark.parametrize(
    ("name", "state", "options", "error"),
    [
        ("tupe-a", {"pos.weight": torch.ones(17, 8)}, {}, "must have pos.weight, pos_ln.weight"),
        ("t5", {}, {}, "must have relative_attention_bias, .* got nothing"),
        ("t5", {f"{n}/relative_attention_bias": torch.full((2, 32), i) for i, n in
                enumerate(("encoder", "decoder"))}, {}, "must have the weights of one, got 2"),
        ("shaw", shaw(range(3)), {}, "of 2 layers .*, got 3"),
        ("shaw", shaw(range(2)), {"max_distance": 4}, "give max_distance=16"),
        ("shaw", shaw(range(2)), {"variant": "paper"}, 'variant must be "author"'),
        ("kerple-log", {}, {"layers": "each"}, 'give the option layers="shared"'),
        ("synthesizer-random", {"R": torch.ones(16, 2, 16)}, {"variant": "paper"}, "variant must"),
        ("cable", {}, {"variant": "paper"}, 'variant must be "author"'),
        ("fox", {"model.fgate_proj.weight": torch.ones(2, 8)}, {}, "must have fgate_proj.weight, "),
        ("fox", {f"layers.{i}.{n}": torch.ones(3, 8) if n.endswith("t") else torch.ones(3)
                 for i in range(2) for n in ("fgate_proj.weight", "fgate_proj.bias")}, {},
         r"gates.0.weight must have the shape \(2, 8\), the checkpoint has \(3, 8\)"),
        ("rotary", {}, {}, "published no weights"),
        ("alibi", {}, {}, "published no weights"),
    ],
)  # fmt: skip
def test_what_does_not_fit(name, state, options, error):
    is_causal = name in ("cable", "fox")
    config = PositionConfig(8, 2, 2, 16, is_causal=is_causal, options=options)
    with pytest.raises(ValueError, match=error):
        from_reference(name, state, config)
