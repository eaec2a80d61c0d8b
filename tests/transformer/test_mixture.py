"""A method and a window for each layer: by hand, in every way that a model is used, refused."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import formulas
import own_methods
import position_formulas
import tisa
from small_transformer import config_of, tokens
from tisa.positions import PositionConfig, build_position, places_of, resolve
from tisa.transformer import (
    Cache,
    LanguageModel,
    Transformer,
    TransformerConfig,
    attention,
    load,
    save,
)
from tisa.transformer.forward_pass import ForwardPass


def model_of(cls=Transformer, **values):
    torch.manual_seed(1)
    model = cls(config_of(**values)).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.05, 0.3)
    return model


def by_hand(model, ids):
    """Return the hidden states of "tisa+rotary:base=100", its attention pair by pair."""
    config, heads = model.config, model.config.num_attention_heads
    d, hidden = config.hidden_size // heads, model.embeddings(ids)
    rates = [100 ** (-2 * i / d) for i in range(d // 2)]
    kernels = [
        {n.removeprefix("kernel_"): p.tolist() for n, p in scoring.named_parameters()}
        for scoring in model.position.methods[0].scoring
    ]
    windows = config.windows or (None,) * config.num_hidden_layers

    def turn(vector, position):
        first, second = vector[: d // 2], vector[d // 2 :]
        cosines, sines = (np.array([f(position * r) for r in rates]) for f in (math.cos, math.sin))
        return np.concatenate((first * cosines - second * sines, first * sines + second * cosines))

    for layer, block in enumerate(model.blocks):
        ours = kernels[layer // 2]

        def logit(h, i, j, q_i, k_j, layer=layer, ours=ours):
            if windows[layer] is not None and abs(i - j) > windows[layer]:
                return -math.inf
            if config.is_causal and j > i:
                return -math.inf
            score = 0.0
            if layer % 2 == 0:
                parts = (ours[name][h] for name in ("amplitudes", "sharpness", "offsets"))
                score = formulas.tisa(*parts, j - i)
            return q_i @ k_j / math.sqrt(d) + score

        named = [(f"attention.{n}", p.detach()) for n, p in block.attention.named_parameters()]
        told = SimpleNamespace(
            named_parameters=lambda named=named: named, attention=block.attention
        )
        normed = block.attention_norm(hidden).detach().numpy()
        mixed = position_formulas.attend(
            told, normed, logit=logit, turn=turn if layer % 2 else None
        )
        hidden = hidden + torch.from_numpy(mixed)
        hidden = hidden + block.feed_forward(block.feed_forward_norm(hidden))
    return model.norm(hidden)


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, 2), (False, [None, 0, 3])])
def test_every_layer_has_its_method_and_window(is_causal, window):
    model = model_of(
        position=["tisa", "rotary:base=100"], window=window, is_causal=is_causal,
        num_hidden_layers=4,
    )  # fmt: skip
    x = tokens(1, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], by_hand(model, x[0]), rtol=1e-10, atol=1e-10)


def test_gradients():
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=5, hidden_size=4, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=4, position=["tisa:num_kernels=1", "shaw:max_distance=1", "rotary"],
        window=[1, None],
    )  # fmt: skip
    model, ids = Transformer(config).double(), torch.randint(0, 5, (1, 4))
    own = dict(model.named_parameters())
    for p in own.values():
        torch.nn.init.normal_(p, 0.4, 0.3)

    cotangent = torch.randn(1, 4, 4, dtype=torch.float64)

    def loss(step=0.0):
        moved = {name: p + step * way for (name, p), way in zip(own.items(), ways, strict=True)}
        return (torch.func.functional_call(model, moved, (ids,)) * cotangent).sum()

    # Along any way through all parameters, a slope.
    ways = [torch.randn_like(p) for p in own.values()]
    found = torch.autograd.grad(loss(), list(own.values()))
    slope = sum((g * way).sum() for g, way in zip(found, ways, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-7)
    assert all(
        g.abs().max() > 1e-6 for g, name in zip(found, own, strict=True) if "key" not in name
    )


# Each with what the others have not: weights, logits of pairs, no content, an own threshold.
MIXED = [
    ("rotary+none", [2, None]),
    ("tisa", 2),
    ("shaw:max_distance=2+rotary:base=100+fire:initial_length=3", [None, 1, 3]),
    ("synthesizer-dense+t5", 3),
]
EVERY = pytest.mark.parametrize(
    ("position", "window"),
    [pytest.param(*case, marks=() if "fire" in case[0] else pytest.mark.full) for case in MIXED],
    ids=[name for name, _ in MIXED],
)


@EVERY
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_and_packed(position, window, is_causal):
    model, x = model_of(position=position, window=window, is_causal=is_causal), tokens(2, 10)
    mask = torch.arange(10) < torch.tensor([[6], [10]])
    ends = torch.tensor([0, 6, 16], dtype=torch.int32)
    with torch.no_grad():
        alone = [model(x[:1, :6])[0], model(x[1:])[0]]
        padded = model(x, attention_mask=mask)[mask]
        packed = model(x[mask], cu_seqlens=ends, max_seqlen=10)
    torch.testing.assert_close(padded, torch.cat(alone), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)


@EVERY
def test_token_by_token(position, window):
    model, x = model_of(position=position, window=window, is_causal=True), tokens(2, 10)
    with torch.no_grad():
        for pieces in ([1] * 10, [4, 1, 5]):
            cache = Cache()
            found = [model(piece, cache=cache) for piece in x.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(found, dim=1), model(x), rtol=1e-9, atol=1e-9)


@EVERY
def test_saved_and_loaded(tmp_path, position, window):
    model = model_of(LanguageModel, position=position, window=window)
    save(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["config"]
    assert written["position"] == model.config.position == resolve(position).name
    again, x = load(tmp_path), tokens(2, 7)
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("position", "window"),
    [MIXED[0], *(pytest.param(*case, marks=pytest.mark.full) for case in MIXED[1:])],
)  # fmt: skip
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled(position, window):
    torch._dynamo.reset()
    model, x = model_of(position=position, window=window), tokens(2, 7)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@EVERY
@pytest.mark.full
@pytest.mark.unchecked
def test_exported(position, window):
    model, x = model_of(position=position, window=window), tokens(2, 7)
    length = torch.export.Dim("length", max=12)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
        for n in (1, 7, 12):
            some = tokens(2, n)
            torch.testing.assert_close(program.module()(some), model(some))


def test_a_model_without_windows_is_saved_as_before():
    assert "window" not in config_of().to_dict()
    assert "window" not in config_of(window=[None]).to_dict()
    config = config_of(window=[None, 4])
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.windows == (None, 4, None)


def test_parameters_are_of_the_layers_of_a_method():
    each = 3 * 5 * 2
    for position, count in (
        ("tisa+none", 2 * each), (["tisa:layers=shared", "none"], each), (["none", "tisa"], each),
        ("t5+none+t5", 32 * 2), ("tisa+tisa:num_kernels=2+none", each + 3 * 2 * 2),
    ):  # fmt: skip
        assert Transformer(config_of(position=position)).num_parameters()[0] == count
    # Options as JSON writes them; no plus sign between two methods is that of a number.
    assert config_of(position="rotary:base=1e+16+none").position == "rotary:base=1e+16+none"
    assert config_of(position=["nope", "rotary"]).position == "none+rotary"
    assert config_of(position=["rotary"]) == config_of(position="rotary")


def test_every_layer_has_the_band_of_its_method(monkeypatch):
    """Bands are asked for on a GPU alone."""
    monkeypatch.setattr(attention, "GPUS", ("cpu",))
    monkeypatch.setattr(attention, "worth_a_band", lambda *_: True)
    model, x = model_of(position="tisa+rotary+tisa:num_kernels=2", is_causal=True), tokens(1, 9)
    run = ForwardPass(model.position.prepare(places_of(9)))
    query = torch.zeros(1, 2, 9, 8)
    found = [attention.At(model.position, n, run).scores(query)[1] for n in range(3)]
    assert found[1] is None
    for layer, method in ((0, 0), (2, 2)):
        (scoring,) = model.position.methods[method].scoring
        assert torch.equal(found[layer], scoring.band(torch.float32))
    assert list(run.bands) == [torch.float32]
    with torch.no_grad():
        with_bands = model(x)
        monkeypatch.undo()
        torch.testing.assert_close(model(x), with_bands, rtol=1e-7, atol=1e-7)


def test_passes_through_one_layer():
    values = dict(position="rotary+none", window=[1, None], num_hidden_layers=3)
    shared, tall = model_of(share_layers=True, **values), model_of(**values)
    state = shared.state_dict()
    tall.load_state_dict({
        name: state[name.replace("blocks.1.", "blocks.0.").replace("blocks.2.", "blocks.0.")]
        for name in tall.state_dict()
    })  # fmt: skip
    x = tokens(2, 7)
    torch.testing.assert_close(tall(x), shared(x))


@pytest.mark.parametrize("name", ["tisa", "shaw", "t5"])
def test_a_layer_of_ones_own_with_a_window(name):
    layer = tisa.SelfAttention(16, 2, position=name, window=2).double()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    k = torch.arange(7)[None, :] - torch.arange(7)[:, None]
    weights = layer.logits(x).masked_fill(k.abs() > 2, -torch.inf).softmax(-1)
    value = layer.attention.value(x).unflatten(-1, (2, 8)).transpose(1, 2)
    mixed = weights @ value
    if name == "shaw":
        mixed = mixed + layer.position.values(0, weights, layer.position.prepare(places_of(7)))
    expected = layer.attention.output(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.full
def test_attention_is_that_of_modernbert():
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=4, pad_token_id=0,
        num_attention_heads=2, local_attention=6, global_attn_every_n_layers=3,
        attn_implementation="eager", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = ModernBertModel(config).double().eval()
    seen = {}
    for number, layer in enumerate(theirs.layers):
        layer.attn.register_forward_hook(
            lambda _, args, kwargs, output, number=number: seen.__setitem__(
                number, ((args or (kwargs["hidden_states"],))[0], output[0])
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        theirs(input_ids=torch.randint(3, 20, (1, 11)))
    ours = Transformer(
        config_of(
            hidden_size=16, num_hidden_layers=4, window=[None, 3, 3],
            position=["rotary:base=160000", "rotary", "rotary"],
        )
    ).double()  # fmt: skip
    run = tisa.transformer.model.begin(
        ours.position, torch.zeros(1, 11, 16), is_causal=False, attention_mask=None, cache=None,
        cu_seqlens=None, max_seqlen=None, windows=ours.config.windows,
    )  # fmt: skip
    for number, layer in enumerate(theirs.layers):
        attention = ours.blocks[number].attention
        maps = zip(["query", "key", "value"], layer.attn.Wqkv.weight.chunk(3), strict=True)
        weights = dict(maps) | {"output": layer.attn.Wo.weight}
        with torch.no_grad():
            for name, weight in weights.items():
                getattr(attention, name).weight.copy_(weight)
                getattr(attention, name).bias.zero_()
            entered, expected = seen[number]
            found = attention(entered, ours.position, number, run)
        # Their cosines are float32.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_methods_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "root.py").write_text(own_methods.FUNCTION)
    cls = resolve(f"{tmp_path}/root.py:Root").scoring
    try:
        with pytest.raises(
            ValueError, match=r"of methods with names, got .*root.py:Root; tisa.reg"
        ):
            config_of(position=[cls, "none"])
        tisa.register("root", cls)
        model = model_of(position="root:start=0.25+none")
        assert model.config.position == config_of(position=["root:start=0.25", "none"]).position
        save(model, tmp_path / "model")
        again, x = load(tmp_path / "model"), tokens(1, 5)
        torch.testing.assert_close(again(x), model(x))
        told = json.loads((tmp_path / "model/config.json").read_text())["config"]
        assert [one and one["cls"] for one in told["position_source"]] == ["Root", None]
    finally:
        own_methods.forget()
    for wrong in ([None], [{"cls": "Root"}, None]):
        with pytest.raises(ValueError, match=r"saved model must say where 'root.none' came from"):
            TransformerConfig.from_dict(
                config_of().to_dict() | {"position": "root+none", "position_source": wrong}
            )
    with pytest.raises(
        ValueError, match=r"under the name 'root', which is not known here; tisa.re"
    ):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"position": []}, "position must name a method for the first layer at least"),
        ({"position": "rotary+lemon"}, "position must be among none, .* got 'lemon'"),
        ({"position": ["rotary"] * 3 + ["none"]}, "at most as many methods as layers, 3, got 4"),
        ({"position": "absolute+none"}, "enter in a layer, got absolute, which is added to the in"),
        ({"position": "rotary+none", "position_options": {"base": 5.0}},
         "must stand with its methods, as in rotary:base=160000.none, got base for all of them"),
        ({"position": "rotary+tisa:lemon=1"}, "options of position 'tisa' must be among"),
        ({"position": "rotary+synthesizer-dense", "share_layers": True}, "share_layers must be Fa"),
        ({"window": -1}, "window must be whole numbers from 0 on, or None without limit, got -1"),
        ({"window": [1, True]}, "window must be whole numbers"),
        ({"window": []}, "window must be a number, or a list of one to 3"),
        ({"window": [1] * 4}, "window must be a number, or a list of one to 3"),
    ],
)  # fmt: skip
@pytest.mark.unchecked
def test_what_is_refused(values, error):
    with pytest.raises(ValueError, match=error):
        Transformer(config_of(**values))


def test_a_mixture_is_for_several_layers():
    with pytest.raises(ValueError, match="at most as many methods as layers, 1, got 2"):
        tisa.SelfAttention(16, 2, position="rotary+none")
    shared = build_position("rotary+none", PositionConfig(16, 2, 4))
    layers = [tisa.SelfAttention(16, 2, position=shared, layer=n).double() for n in range(4)]
    one, x = layers[1], torch.randn(1, 5, 16, dtype=torch.float64)
    bare = tisa.SelfAttention(16, 2, position="none").double()
    bare.attention.load_state_dict(one.attention.state_dict())
    torch.testing.assert_close(one(x), bare(x))
    assert not torch.allclose(layers[2](x)[0, 0], layers[2](x.flip(1))[0, -1])
