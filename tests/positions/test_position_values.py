"""Values of every method against its paper's formula, against `transformers`, and its size."""

from dataclasses import replace

import pytest
import torch

import position_formulas
import tisa
from tisa.positions import (
    METHODS,
    PositionConfig,
    build_position,
    floater,
    flow,
    places_of,
    resolve,
)
from tisa.transformer import Cache, Transformer, TransformerConfig

HIDDEN, HEADS, LENGTH = 8, 2, 11

# At n = 512, d = 768, H = 12, L = 12: the published numbers, and what our own forms add.
COUNTS = {
    "none": 0,
    "sinusoidal": 0,
    "absolute": 393_216,
    "shaw": 608_256,
    "t5": 384,
    "floater": 1_210_368,
    "synthesizer-random": 37_748_736,
    "synthesizer-factorised": 1_179_648,
    "synthesizer-dense": 12 * 12 * (768 * 64 + 64 + 64 * 512 + 512),
    "synthesizer-random-mixed": 37_748_736 + 2 * 144,
    "synthesizer-factorised-mixed": 1_179_648 + 2 * 144,
    "synthesizer-dense-mixed": 12 * 12 * (768 * 64 + 64 + 64 * 512 + 512 + 2),
    "tupe-a": 1_576_704,
    "tupe-r": 1_576_704 + 384,
    "rotary": 0,
    "tisa": 2_160,
    "alibi": 0,
    "kerple-log": 24,
    "kerple-power": 24,
    "tisa-v2": 12 * 12 * (3 * 5 + 1),
    "near-far": 12 * 12 * (3 * 5 + 3),
    "fire": 12 * (32 + 32 + 32 * 12 + 12 + 2),
    "fox": 12 * 12 * (768 + 1),
    "cable": 12 * 12 * 768,
    "near-far-fox": 12 * 12 * (3 * 5 + 3 + 768 + 1),
}
# Where the authors' code computes something else than their paper says.
BY_AUTHOR = [
    (name, {"variant": "author"})
    for name in METHODS
    if name in ("sinusoidal", "shaw", "tupe-r", "cable")
    or name.startswith(("synthesizer", "kerple"))
]
SIZES_BY_AUTHOR = {
    "shaw": 12 * 2 * 33 * 64,
    "tupe-r": 1_576_704 + 384 + 24,
    "cable": 12 * 12 * (768 + 1),
    "synthesizer-dense": 12 * (12 * 768 * 64 + 64 * 512),
    "synthesizer-dense-mixed": 12 * (64 * 512 + 1),
    "synthesizer-random-mixed": 37_748_736 + 12,
    "synthesizer-factorised-mixed": 1_179_648 + 12,
}


def for_decoders(name):
    return resolve(name).causal_only is not None


def layer_of(name, **options):
    layer = tisa.SelfAttention(
        HIDDEN, HEADS, position=name, position_options=options, max_position_embeddings=16,
        is_causal=for_decoders(name),
    ).double()  # fmt: skip
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0.1, 0.5)
        # TISA v2's formula divides by its widths.
        p.data = torch.where(p < 0, p.clamp_max(-0.1), p.clamp_min(0.1)).detach()
    return layer


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in METHODS), *BY_AUTHOR, ("rotary", {"interleaved": True}),
     ("shaw", {"max_distance": 2}), ("tupe-r", {"variant": "before"}),
     ("floater", {"biases": True}), ("fire", {"initial_length": 4.0, "units": 3})],
)  # fmt: skip
def test_output_equals_the_formula(name, options):
    layer = layer_of(name, **options)
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
    expected = [position_formulas.OUTPUTS[name](layer, one.numpy()) for one in x]
    # FLOATER: Runge-Kutta with a fixed step beside an adaptive solver; ReLU has kinks.
    tolerance = 1e-6 if name == "floater" else 1e-10
    with torch.no_grad():
        found = layer(x)
    for one, formula in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.from_numpy(formula), rtol=tolerance, atol=tolerance)


def test_every_method_has_a_formula_and_a_size():
    assert list(position_formulas.OUTPUTS) == list(METHODS)
    assert list(COUNTS) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_parameter_counts_at_bert_base(name):
    with torch.device("meta"):
        position = build_position(name, PositionConfig(is_causal=for_decoders(name)))
    assert sum(p.numel() for p in position.parameters()) == COUNTS[name]


@pytest.mark.parametrize(("name", "options"), BY_AUTHOR)
def test_parameter_counts_of_the_authors_code(name, options):
    with torch.device("meta"):
        config = PositionConfig(options=options, is_causal=for_decoders(name))
        position = build_position(name, config)
    size = sum(p.numel() for p in position.parameters())
    assert size == SIZES_BY_AUTHOR.get(name, COUNTS[name])


@pytest.mark.unchecked
def test_an_unknown_variant():
    for name, _ in BY_AUTHOR:
        with pytest.raises(ValueError, match=r"variant must be .*paper.*author.*, got 'their'"):
            build_position(name, PositionConfig(options={"variant": "their"}))
    with pytest.raises(ValueError, match="options of position 'tupe-a' must be among untie_cls"):
        build_position("tupe-a", PositionConfig(options={"variant": "author"}))


def test_sizes_of_the_paper_under_sharing():
    def positional(name, **values):
        with torch.device("meta"):
            return Transformer(TransformerConfig(position=name, **values)).num_parameters()[0]

    assert positional("tisa", position_options={"layers": "shared"}, share_layers=True) == 180
    assert positional("tisa", share_layers=True) == 2160
    # ALBERT's position table stands at the width of its embeddings.
    assert positional("absolute", embedding_size=128, share_layers=True) == 65_536


def test_rotary_equals_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    q, k = torch.randn(2, 1, 9, 4, 16).unbind()
    theirs = LlamaRotaryEmbedding(config)
    cosines, sines = theirs(q, torch.arange(9)[None])
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cosines, sines)
    ours = build_position("rotary", PositionConfig(hidden_size=64, num_attention_heads=4))
    prepared = ours.prepare(places_of(9))
    for found, theirs_ in zip((q, k), expected, strict=True):
        torch.testing.assert_close(ours.rotate(found, prepared).transpose(1, 2), theirs_)


# Of 11 positions here, after a training at 5; the pairs of 16 of a head of 32 turn 0 to 64 times.
SCALED = [
    {"scaling": "linear", "factor": 2.5},
    {"scaling": "ntk", "factor": 2.5},
    {"scaling": "dynamic_ntk", "original_length": 5},
    {"scaling": "dynamic_ntk", "original_length": 5, "factor": 3.0},
    {"scaling": "dynamic_ntk", "original_length": 11, "factor": 3.0},
    {"scaling": "yarn", "factor": 2.5, "original_length": 400},
    {"scaling": "yarn", "factor": 2.5, "original_length": 400, "ramp": "author"},
    {"scaling": "yarn", "factor": 1, "original_length": 5},
    {"p": 0.5},
    {"p": 0.0},
    {"scaling": "ntk", "factor": 4, "p": 0.75},
]


@pytest.mark.parametrize("options", SCALED)
def test_rotary_at_other_rates_equals_the_formula(options):
    layer = tisa.SelfAttention(
        64, 2, position="rotary", position_options=options, max_position_embeddings=16
    ).double()
    x = torch.randn(1, LENGTH, 64, dtype=torch.float64)
    expected = position_formulas.rotary(layer, x[0].numpy(), **options)
    with torch.no_grad():
        found = layer(x)[0].numpy()
    assert abs(found - expected).max() < 1e-10
    assert torch.autograd.gradcheck(layer, (x[:, :3].requires_grad_(),), fast_mode=True)
    # Not what is computed without the option, but where it says so.
    plain = position_formulas.rotary(layer, x[0].numpy())
    same = options.get("original_length") == 11 or options.get("factor") == 1
    assert (abs(expected - plain).max() < 1e-10) == same


@pytest.mark.parametrize("length", [7, 64, 200])
@pytest.mark.parametrize(
    ("kind", "options", "theirs"),
    [
        ("linear", {"scaling": "linear", "factor": 4.0}, {}),
        ("dynamic", {"scaling": "dynamic_ntk", "factor": 2.0}, {}),
        ("yarn", {"scaling": "yarn", "factor": 4.0, "ramp": "author"},
         {"original_max_position_embeddings": 64}),
        ("yarn", {"scaling": "yarn", "factor": 9.5, "ramp": "author", "original_length": 4096},
         {"original_max_position_embeddings": 4096}),
        ("proportional", {"p": 0.3}, {"partial_rotary_factor": 0.3}),
        ("proportional", {"p": 0.75}, {"partial_rotary_factor": 0.75}),
    ],
)  # fmt: skip
def test_rates_are_those_of_transformers(kind, options, theirs, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    told = {"rope_type": kind, "rope_theta": 10000.0, "factor": options.get("factor", 1.0)}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=64,
        rope_parameters=told | theirs,
    )  # fmt: skip
    rates, temperature = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    sizes = PositionConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=64, options=options
    )
    ours = build_position("rotary", sizes).scaling
    # Theirs are float32.
    torch.testing.assert_close(ours.rates(length).float(), rates, rtol=1e-5, atol=1e-9)
    assert ours.temperature == pytest.approx(temperature, rel=1e-12)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    config = PositionConfig(hidden_size=64, num_attention_heads=1)
    plain = build_position("rotary", config).scaling.rates(9)
    config = replace(config, options={"scaling": "ntk", "factor": 8})
    slower = plain / build_position("rotary", config).scaling.rates(9)
    torch.testing.assert_close(slower[[0, -1]], torch.tensor([1.0, 8.0], dtype=torch.float64))
    assert (slower.diff() > 0).all()


def test_dynamic_rates_and_a_cache():
    """Up to the length of the training a cache is exact; from there on its keys would be stale."""
    config = TransformerConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, is_causal=True,
        position="rotary", position_options={"scaling": "dynamic_ntk", "original_length": 6},
    )  # fmt: skip
    model, x, cache = Transformer(config).double().eval(), torch.randint(0, 20, (1, 8)), Cache()
    with torch.no_grad():
        found = [model(piece, cache=cache) for piece in (x[:, :4], x[:, 4:6])]
        torch.testing.assert_close(torch.cat(found, dim=1), model(x[:, :6]))
        assert model(x).shape == (1, 8, 16)
        with pytest.raises(ValueError, match=r"at most 6 tokens \(original_length\), got 8"):
            model(x[:, 6:], cache=cache)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scaling": "yam"}, "scaling must be one of none, linear, ntk, dynamic_ntk, yarn, got"),
        ({"scaling": "yarn"}, "factor must be given with scaling='yarn', got None"),
        ({"scaling": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"factor": 2.0}, "factor and original_length must be None without scaling, got 2.0"),
        ({"scaling": "dynamic_ntk", "original_length": 0}, "original_length must be at least 1"),
        ({"p": 1.5}, r"p must lie in \[0, 1\], the share of pairs, got 1.5"),
        ({"ramp": "their"}, "ramp must be paper or author, got 'their'"),
        ({"base": 0.5, "scaling": "ntk", "factor": 2.0}, "base must be above 1 with scaling"),
        ({"base": 0.0}, "base must be above 0, got 0"),
    ],
)
@pytest.mark.unchecked
def test_what_rotary_refuses(options, error):
    with pytest.raises(ValueError, match=error):
        build_position("rotary", PositionConfig(16, 2, options=options))


@pytest.mark.unchecked
def test_ntk_of_narrow_heads():
    with pytest.raises(ValueError, match="heads must be at least 4 wide for scaling='ntk', got 2"):
        build_position("rotary", PositionConfig(4, 2, options={"scaling": "ntk", "factor": 2.0}))


def test_rotary_is_exact_a_million_tokens_away():
    rotary = build_position("rotary", PositionConfig(hidden_size=64, num_attention_heads=1))
    prepared = rotary.prepare(places_of(3, query_start=1_000_000))
    ones = torch.ones(3, 1, 64)
    angle = torch.arange(1_000_000, 1_000_003).double()[:, None] / 10000 ** (
        torch.arange(32).double() / 32
    )
    expected = torch.cat((angle.cos() - angle.sin(), angle.sin() + angle.cos()), dim=-1)[:, None]
    # In float32 the angle itself is wrong by up to 0.03.
    torch.testing.assert_close(rotary.rotate(ones, prepared).double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(rotary.rotate(ones.double(), prepared), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_t5_equals_transformers(is_causal):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=is_causal)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = build_position(
        "t5", PositionConfig(hidden_size=32, num_attention_heads=4, is_causal=is_causal)
    )
    with torch.no_grad():
        ours.scoring[0].bucket_scores.copy_(theirs.relative_attention_bias.weight.T)
        expected = theirs.compute_bias(300, 300)[0]
    found = ours.scoring[0].matrix(300)
    if is_causal:
        expected, found = expected.tril(), found.tril()
    torch.testing.assert_close(found, expected)


def test_floater_solutions_are_kept_and_renewed(monkeypatch):
    position = build_position("floater", PositionConfig(hidden_size=8, num_attention_heads=2))
    optimizer = torch.optim.AdamW([position.starts], lr=1.0, fused=True)
    position.starts.grad = torch.ones_like(position.starts)
    asked, solve = [], flow.follow
    monkeypatch.setattr(
        floater, "follow", lambda state, grid, p: (asked.append(grid.positions - 1),
                                                 solve(state, grid, p))[1],
    )  # fmt: skip
    with torch.no_grad():
        first = position.solve(20)
        assert sum(asked) == 19
        again, shorter = position.solve(20), position.solve(7)
        assert sum(asked) == 19
        assert torch.equal(first, again)
        assert torch.equal(shorter, first[:, :, :7])
        longer = position.solve(23)
        assert sum(asked) == 22
        assert torch.equal(longer[:, :, :20], first)
        position.starts.add_(1.0)
        assert not torch.allclose(position.solve(23), longer)
        asked.clear()
        position.starts.sub_(1.0)
        torch.testing.assert_close(position.solve(23), longer)
        assert sum(asked) == 22
        # Neither of these leaves a trace on what it changes, not even its version.
        for change in (lambda: position.starts.data.add_(1.0), optimizer.step):
            before = position.solve(23)
            change()
            assert not torch.allclose(position.solve(23), before)
    position.starts.grad = None
    position.solve(5).sum().backward()
    assert position.flow.first.weight.grad.abs().sum() > 0
    assert position.starts.grad.abs().sum() > 0


@pytest.mark.unchecked
def test_floater_with_a_stride_goes_into_a_compiled_graph():
    config = tisa.TransformerConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        position="floater", position_options={"stride": 8},
    )  # fmt: skip
    model, tokens = tisa.LanguageModel(config), torch.randint(0, 20, (2, 21))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(model, tokens), gradients(compiled, tokens), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(tokens), model(tokens))


def gradients(model, tokens):
    model.zero_grad()
    model(tokens).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_floater_gradients_are_those_of_its_steps():
    """Its operator goes back through the steps by hand; autograd goes through the same ones."""
    grid = flow.Grid(0.03, 0.002, 7, 5)
    state = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    parameters = list(flow.Flow(8).double().parameters())
    cotangent, found = torch.randn(7, 6, 8, dtype=torch.float64), []
    for solve in (flow.follow, flow.stepped):
        states = solve(state, grid, parameters)
        found.append([states, *torch.autograd.grad((states * cotangent).sum(),
                                                   [state, *parameters])])  # fmt: skip
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.unchecked
def test_floater_operators_are_what_they_say():
    state = torch.randn(6, 8, requires_grad=True)
    parameters = list(flow.Flow(8).parameters())
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flow._operator, (state, *parameters, 0.0, 0.002, 4, 5), test_utils=some)
    solved, own = torch.randn(4, 6, 8), [p.detach() for p in parameters]
    torch.library.opcheck(flow._backward, (solved, solved, *own, 0.0, 0.002, 5), test_utils=some)


def test_floater_keeps_no_step_for_its_backward_pass():
    """What autograd keeps are the states at the positions, not the twenty maps between two."""
    position = build_position("floater", PositionConfig(64, 2, 4))
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        solved = position.solve(40)
    weights = sum(p.numel() for p in position.flow.parameters())
    assert solved.numel() <= sum(kept) <= 2 * solved.numel() + 2 * weights


def test_floater_second_derivatives():
    layer = tisa.SelfAttention(4, 2, position="floater").double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)

    def loss(starts):
        return torch.func.functional_call(layer, {"position.starts": starts}, (x,)).square().sum()

    starts = layer.position.starts
    with pytest.raises(RuntimeError, match="FLOATER: its flow has no second derivative"):
        torch.autograd.grad(
            torch.autograd.grad(loss(starts), starts, create_graph=True)[0].sum(), starts
        )
    step, values = 1e-5, starts.detach()
    across = torch.randn_like(values)
    numeric = torch.func.grad(loss)(values + step * across)
    numeric = (numeric - torch.func.grad(loss)(values - step * across)) / (2 * step)
    exact = torch.func.jvp(torch.func.grad(loss), (values,), (across,))[1]
    torch.testing.assert_close(exact, numeric, rtol=1e-5, atol=1e-7)


def test_sinusoidal_waves_can_be_made_smaller():
    config = PositionConfig(hidden_size=8, num_attention_heads=2)
    small = build_position("sinusoidal", replace(config, options={"scale": 0.5}))
    whole = build_position("sinusoidal", config)
    torch.testing.assert_close(small.shared(places_of(5)), 0.5 * whole.shared(places_of(5)))
    with pytest.raises(ValueError, match="scale must be above 0, got 0"):
        build_position("sinusoidal", replace(config, options={"scale": 0}))


def test_tupe_in_a_decoder_unties_no_first_token():
    config = PositionConfig(hidden_size=8, num_attention_heads=2, is_causal=True)
    assert not build_position("tupe-a", config).untie_cls
    tied = build_position("tupe-a", config).shared(places_of(5))[0]
    assert not torch.allclose(tied[0, :, 0, 1], tied[0, :, 0, 2])


@pytest.mark.parametrize("length", [1, 2, 8, 9, 40])
def test_floater_with_a_stride_is_the_same_flow(length):
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    exact = build_position("floater", PositionConfig(**sizes))
    torch.nn.init.normal_(exact.starts)
    fast = build_position("floater", PositionConfig(**sizes, options={"stride": 8}))
    fast.load_state_dict(exact.state_dict())
    one, other = exact.solve(length), fast.solve(length)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    for a, b in zip(
        torch.autograd.grad(one.square().sum(), list(exact.parameters()), allow_unused=True),
        torch.autograd.grad(other.square().sum(), list(fast.parameters()), allow_unused=True),
        strict=True,
    ):
        if length > 1:
            assert (a - b).norm() < 0.03 * a.norm()
