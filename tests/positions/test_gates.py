"""Gates: sums over the tokens in the cache, in packed and padded batches; what they begin with."""

import math

import pytest
import torch

import tisa
from tisa.positions import PositionConfig, build_position, places_of
from tisa.positions.gates import summed
from tisa.testing import contract
from tisa.testing.contract import tokens
from tisa.transformer import Cache, LanguageModel, SelfAttention, Transformer, load, save

GATED = ["fox", "cable", "cable:variant=author", "near-far-fox"]


def model_of(name, cls=Transformer, **values):
    return contract.model_of(name, cls, **values).double().eval()


@pytest.mark.parametrize("name", GATED)
def test_padding_anywhere_changes_nothing(name):
    """On the left, in the middle (a shorter prompt that is continued) and on the right."""
    model, x = model_of(name), tokens(1, 6)
    if name == "near-far-fox":
        # Its curve counts places; the gate alone does not.
        for scoring in model.position.curve.scoring:
            scoring.near.kernel_amplitudes.data.zero_()
            scoring.raw_strengths.data.fill_(-1000.0)
    wide, mask = tokens(3, 9), torch.zeros(3, 9, dtype=torch.bool)
    for row, places in enumerate(([3, 4, 5, 6, 7, 8], [0, 1, 2, 5, 6, 8], [0, 1, 2, 3, 4, 5])):
        wide[row, places], mask[row, places] = x[0], True
    with torch.no_grad():
        found, cache = model(wide, attention_mask=mask), Cache()
        pieces = [model(wide[:, :4], attention_mask=mask[:, :4], cache=cache)]
        pieces += [model(wide[:, i : i + 1], attention_mask=mask[:, : i + 1], cache=cache)
                   for i in range(4, 9)]  # fmt: skip
        for batch in (found, torch.cat(pieces, dim=1)):
            for row in range(3):
                torch.testing.assert_close(batch[row, mask[row]], model(x)[0])


def test_a_late_token_is_as_exact_as_an_early_one():
    """A cache keeps the sums themselves, of which only differences count, in float64."""
    torch.manual_seed(0)
    layer = SelfAttention(8, 2, position="fox", is_causal=True)
    layer.position.gates[0].bias.data.fill_(-200.0)
    exact = SelfAttention(8, 2, position="fox", is_causal=True).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(1, 100, 8)
    cache, outputs = Cache(), []
    with torch.no_grad():
        expected = exact(x.double())
        for token in x.split(1, dim=1):
            outputs.append(layer(token, cache=cache))
    assert cache.key_scores[0].dtype == torch.float64
    # A token leaves e^−200 of all before it: 20,000 at the end, where float32 has steps of 0.002.
    assert cache.key_scores[0][0, 0, -1] > 19_000
    torch.testing.assert_close(torch.cat(outputs, 1).double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_are_those_of_the_steps():
    steps = torch.rand(2, 3, 5)
    places = places_of(5)
    torch.testing.assert_close(summed(steps, None, places), steps.double().cumsum(-1))
    before = torch.rand(2, 3, 1, dtype=torch.float64)
    torch.testing.assert_close(summed(steps, before, places), steps.double().cumsum(-1) + before)
    packed = torch.arange(1.0, 7.0).expand(2, 6)
    places = tisa.positions.Places(4, 4, 0, torch.tensor([0, 1, 0, 1, 2, 3]))
    # Each sequence begins at 0: its first step is between it and no key.
    assert summed(packed, None, places).tolist() == [[0, 2, 0, 4, 9, 15]] * 2


class Loud(tisa.Position):
    """A score of each key that is no sum, made in each of the ways that logits are made."""

    scores_keys = True

    def __init__(self, config, *, dense=False, needs_weights=False):
        super().__init__(config)
        self.dense, self.needs_weights = dense, needs_weights
        self.loudness = torch.nn.Parameter(torch.ones(config.num_attention_heads, 8))

    def key_scores(self, layer, hidden, before, prepared):
        return self.loudness @ hidden.transpose(-1, -2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_method_of_ones_own(is_causal, monkeypatch):
    """Fused, with logits of pairs, with the weights themselves: padded, packed, some at a time."""
    sizes = {"position": Loud, "is_causal": is_causal}
    fused = SelfAttention(8, 2, **sizes).double()
    x, ends = torch.randn(2, 7, 8).double(), torch.tensor([0, 2, 7], dtype=torch.int32)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    packed = {"cu_seqlens": ends, "max_seqlen": 5}
    expected = fused(x), fused(x, attention_mask=mask), fused(x[0], **packed)
    torch.testing.assert_close(expected[2][:2], fused(x[:1, :2])[0])
    torch.testing.assert_close(expected[2][2:], fused(x[:1, 2:])[0])
    for options in ({"dense": True}, {"needs_weights": True}):
        layer = SelfAttention(8, 2, position_options=options, **sizes).double()
        layer.load_state_dict(fused.state_dict())
        with torch.no_grad():
            for at_once in (1 << 24, 1):
                monkeypatch.setattr("tisa.transformer.attention.WEIGHTS_AT_ONCE", at_once)
                found = layer(x), layer(x, attention_mask=mask), layer(x[0], **packed)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other)


def test_some_layers_have_gates_and_windows_and_sinks():
    """In a mixture each layer has its own scores of keys, or none, in one cache and in packs."""
    mixed = "fox+rotary+near-far-fox"
    model = model_of(mixed, num_hidden_layers=5, window=[None, 4, None, 3, 5], sinks=True)
    x, cache = tokens(2, 10), Cache()
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    with torch.no_grad():
        full = model(x)
        found = [model(piece, cache=cache) for piece in x.split([4, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(found, 1), full)
        assert sorted(cache.key_scores) == [0, 2, 3]
        packed = model(x[0], cu_seqlens=ends, max_seqlen=7)
        torch.testing.assert_close(packed[:3], full[0, :3])
        torch.testing.assert_close(packed[3:], model(x[:1, 3:])[0])
        # Padding in the middle: no layer but rotary's counts places, and windows do.
        gates = model_of("fox+none", num_hidden_layers=2)
        mask = torch.ones(2, 10).index_fill(1, torch.tensor([2, 3]), 0)
        kept = x[:, mask[0].bool()]
        found = gates(x, attention_mask=mask.long())[:, mask[0].bool()]
        torch.testing.assert_close(found, gates(kept))
    with pytest.raises(ValueError, match="Fox: is_causal must be True"):
        Transformer(tisa.TransformerConfig(20, 16, 3, 2, position=mixed))


@pytest.mark.parametrize("name", ["fox", "near-far-fox"])
def test_saved_and_loaded(name, tmp_path):
    model, x = model_of(name, LanguageModel), tokens(2, 7)
    save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(x), model(x))


@pytest.mark.parametrize("name", ["fox", "near-far-fox"])
def test_generation_from_a_cache_is_generation_without_one(name):
    model, x = model_of(name, LanguageModel), tokens(2, 4)
    expected = x
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(x, 6), expected)


def test_gradients_with_checkpointing_are_the_same():
    model, x, found = model_of("near-far-fox").train(), tokens(2, 9), []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_that_forgets_hides_all_before_it():
    layer = SelfAttention(8, 2, position="fox", is_causal=True).double()
    gate, x = layer.position.gates[0], torch.randn(1, 7, 8, dtype=torch.float64)
    # Open for every token but the fourth, whose first number alone is not 0.
    x[..., 0] = torch.tensor([0, 0, 0, 1, 0, 0, 0])
    gate.weight.data.zero_()[:, 0] = -2000.0
    gate.bias.data.fill_(1000.0)
    torch.testing.assert_close(layer(x)[:, 3:], layer(x[:, 3:]))
    plain = SelfAttention(8, 2, position="none", is_causal=True).double()
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if "position" not in n})
    torch.testing.assert_close(layer(x)[:, :3], plain(x)[:, :3])


def test_the_code_of_cable_is_fox_with_other_signs():
    cable = SelfAttention(8, 2, position="cable:variant=author", is_causal=True)
    fox = SelfAttention(8, 2, position="fox", is_causal=True)
    signs = {n: -p if "position" in n else p for n, p in cable.state_dict().items()}
    fox.load_state_dict(signs)
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(fox(x), cable(x))


def test_what_they_begin_with():
    config = PositionConfig(64, 4, 2, is_causal=True)
    for name in GATED[:3]:
        gates = build_position(name, config).gates
        assert [gate.bias is None for gate in gates] == [name == "cable"] * 2
        assert all(0.01 < gate.weight.std() < 0.03 for gate in gates)
        assert all(not gate.bias.any() for gate in gates if gate.bias is not None)
    ours = build_position("near-far-fox:num_kernels=3", config)
    for gate in ours.gate.gates:
        slopes = torch.tensor([2 ** (-8 * h / 4) for h in (1, 2, 3, 4)])
        torch.testing.assert_close(torch.sigmoid(gate.bias), (-slopes).exp())
    for scoring in ours.curve.scoring:
        assert scoring.near.kernel_offsets.shape == (4, 3)
        # Over a thousand tokens the curve takes less than any head's gate.
        assert -0.1 < scoring.scores(torch.tensor([-1000])).max() <= 0
    assert tisa.positions.resolve("near-far-fox").scoring is None


def test_half_precision_and_layers():
    for layers, copies in (("each", 2), ("shared", 1), ("first", 1)):
        model = contract.model_of(f"near-far-fox:layers={layers}").bfloat16()
        assert len(model.position.gate.gates) == len(model.position.curve.scoring) == copies
        found, cache = model(tokens(2, 9)), Cache()
        assert found.dtype == torch.bfloat16
        model(tokens(2, 9), cache=cache)
        assert sorted(cache.key_scores) == ([0] if layers == "first" else [0, 1])


def test_options_go_to_the_curve():
    with pytest.raises(
        ValueError, match="options of position 'near-far-fox' must be among init, layers"
    ):
        build_position("near-far-fox:lemon=1", PositionConfig(is_causal=True))


def test_a_ring_has_no_sums_over_its_processes():
    from tisa.ops.ring import Ring
    from tisa.transformer.forward_pass import begin

    position = build_position("fox", PositionConfig(8, 2, 1, is_causal=True))
    with pytest.raises(ValueError, match="Fox cannot be used with a ring: it needs sums over all"):
        begin(
            position, torch.zeros(1, 4, 8), is_causal=True, attention_mask=None, cache=None,
            cu_seqlens=None, max_seqlen=None, ring=object.__new__(Ring),
        )  # fmt: skip


def test_math_of_a_forget_gate():
    """f = σ(z): −log f = softplus(−z), also where f is 0 or 1 in float32."""
    fox = build_position("fox", PositionConfig(8, 1, 1, is_causal=True))
    z = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0])
    expected = torch.tensor([200.0, math.log1p(math.e), math.log(2), math.log1p(1 / math.e), 0.0])
    torch.testing.assert_close(fox.steps(z[:, None])[:, 0], expected)
