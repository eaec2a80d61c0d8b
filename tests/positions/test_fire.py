"""FIRE on both sides of its threshold: by the formula, and one form against the other."""

import pytest
import torch

import position_formulas
import tisa
from tisa.positions import PositionConfig, build_position, fire, places_of
from tisa.positions.published import from_reference
from tisa.transformer import Cache, Transformer, TransformerConfig


def layer_of(threshold, *, units=3):
    """Return a layer with any weights whose threshold is that number."""
    layer = tisa.SelfAttention(
        4, 2, position="fire", position_options={"units": units, "initial_length": 2.0}
    ).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0.1, 0.7)
    # Their sizes count, not their signs.
    torch.nn.init.constant_(layer.position.multipliers, -threshold / 2)
    torch.nn.init.constant_(layer.position.rates, -0.4)
    return layer


@pytest.mark.parametrize("threshold", [0.5, 2.5, 30.0])
def test_every_gradient_is_that_of_the_formula(threshold):
    layer, x = layer_of(threshold), torch.randn(1, 6, 4, dtype=torch.float64)
    cotangent = torch.randn(6, 4, dtype=torch.float64)
    (layer(x)[0] * cotangent).sum().backward()
    for name, parameter in layer.position.named_parameters():
        flat = parameter.data.view(-1)
        for i, value in enumerate(flat.tolist()):
            sums = []
            for step in (1e-6, -1e-6):
                flat[i] = value + step
                sums.append((position_formulas.fire(layer, x[0].numpy()) * cotangent.numpy()).sum())
            flat[i] = value
            numeric = (sums[0] - sums[1]) / 2e-6
            assert float(parameter.grad.view(-1)[i]) == pytest.approx(
                numeric, rel=1e-6, abs=1e-8
            ), name


@pytest.mark.parametrize("length", [1, 5, 7])
@pytest.mark.parametrize("threshold", [6.0, 6.5])
def test_both_forms_are_one_up_to_the_threshold(monkeypatch, length, threshold):
    """With the last query at L itself too, where the larger of two equal numbers is taken."""
    layer, x = layer_of(threshold), torch.randn(2, length, 4, dtype=torch.float64)
    found = []
    for look in (True, False):
        monkeypatch.setattr(fire, "plain", lambda *_, look=look: look)
        prepared = layer.position.prepare(places_of(length))
        assert layer.position.is_dense(0, prepared) is not look
        assert (layer.position.offset_scores(0, prepared) is None) is not look
        layer.zero_grad()
        output = layer(x)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_scores_do_not_jump_at_the_threshold():
    """L from just above the last query to just below: from one form to the other."""
    x, found = torch.randn(1, 7, 4, dtype=torch.float64), []
    for threshold in (6.0, 6.0 - 1e-9):
        torch.manual_seed(0)
        layer = layer_of(threshold)
        assert layer.position.is_dense(0, layer.position.prepare(places_of(7))) == (threshold < 6)
        found.append(layer(x).detach())
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def model_of(**values):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, position="fire",
        position_options={"units": 3, "initial_length": 8.0}, **values,
    )  # fmt: skip
    model = Transformer(config).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.5)
    # The first layer's threshold lies at 4, the other's at 40.
    model.position.multipliers.data.copy_(torch.tensor([0.5, 5.0]))
    return model


def test_every_layer_has_a_threshold_of_its_own():
    position = model_of().position
    dense = {n: [position.is_dense(layer, position.prepare(places_of(n))) for layer in (0, 1)]
             for n in (5, 6, 41, 42)}  # fmt: skip
    assert dense == {5: [False] * 2, 6: [True, False], 41: [True, False], 42: [True] * 2}


def test_a_decoder_goes_past_the_threshold():
    model, x = model_of(is_causal=True), torch.randint(0, 20, (2, 12))
    with torch.no_grad():
        full, cache = model(x), Cache()
        pieces = [model(piece, cache=cache) for piece in x.split([3, 1, 1, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=1e-10, atol=1e-10)
        ends = torch.tensor([0, 12, 15, 24], dtype=torch.int32)
        tokens = torch.cat((x[0], x[1, :3], x[1, 3:]))
        packed = model(tokens, cu_seqlens=ends, max_seqlen=12)
        apart = [model(part[None])[0] for part in tokens.split([12, 3, 9])]
        torch.testing.assert_close(packed, torch.cat(apart), rtol=1e-10, atol=1e-10)


def test_pairs_are_made_some_queries_at_a_time(monkeypatch):
    model, x = model_of(), torch.randint(0, 20, (1, 12))
    with torch.no_grad():
        whole = model(x)
        monkeypatch.setattr(fire, "AT_ONCE", 3 * 12 * 5)
        torch.testing.assert_close(model(x), whole, rtol=1e-12, atol=1e-12)


def test_scores_stay_float32():
    position = build_position("fire", PositionConfig(16, 2)).to(torch.bfloat16)
    assert {p.dtype for p in position.parameters()} == {torch.float32}
    assert position.prepare(places_of(5)).shared.scores[0].dtype == torch.float32


@pytest.mark.unchecked
def test_what_does_not_fit():
    config = PositionConfig(8, 2, 1)
    for options, error in (
        ({"units": 0}, "units must be at least 1"),
        ({"initial_length": 0.0}, "initial_length must be above 0"),
    ):
        with pytest.raises(ValueError, match=error):
            build_position("fire", PositionConfig(8, 2, 1, options=options))
    state = {"mlp.0.weight": torch.ones(32, 1), "mlp.0.bias": torch.ones(32), "c": torch.ones(()),
             "mlp.2.weight": torch.ones(2, 32), "mlp.2.bias": torch.ones(2),
             "L_multiplier": torch.ones(()), "init_L": torch.tensor(64.0)}  # fmt: skip
    with pytest.raises(ValueError, match=r"initial_length must be 64\.0, the checkpoint's init_L"):
        from_reference("fire", state, config)
    read = from_reference("fire", state | {"init_L": torch.tensor(512.0)}, config)
    assert read.outer_weights.shape == (1, 2, 32)
