"""The transformer around the methods: norms, sharing, heads, errors."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tisa
from small_transformer import config_of, tokens
from tisa.positions import PositionConfig, build_position
from tisa.transformer import Cache, LanguageModel, Transformer

ROOT = Path(__file__).parents[2]


def test_pre_norm_and_post_norm_by_hand():
    x = tokens(2, 7)
    for norm in ("pre", "post"):
        model = Transformer(config_of(norm=norm, position="none", num_hidden_layers=1))
        block = model.blocks[0]
        run = tisa.transformer.model.begin(
            model.position, torch.zeros(2, 7, 16), is_causal=False, attention_mask=None,
            cache=None, cu_seqlens=None, max_seqlen=None,
        )  # fmt: skip

        def attend(h, block=block, model=model, run=run):
            return block.attention(h, model.position, 0, run)

        h = model.embeddings(x)
        if norm == "post":
            h = model.norm(h)
            h = block.attention_norm(h + attend(h))
            h = block.feed_forward_norm(h + block.feed_forward(h))
        else:
            h = h + attend(block.attention_norm(h))
            h = model.norm(h + block.feed_forward(block.feed_forward_norm(h)))
        torch.testing.assert_close(model(x), h)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_new_initial_values_for_everything_but_the_positions(norm):
    torch.manual_seed(3)
    model = Transformer(config_of(norm=norm, embedding_size=4))
    for p in model.parameters():
        torch.nn.init.constant_(p, 7.0)
    model.reset_parameters()
    left = {name for name, p in model.named_parameters() if (p == 7).any()}
    assert left == {f"position.{name}" for name, _ in model.position.named_parameters()}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_albert_shares_weights_and_not_positions(norm):
    apart = Transformer(config_of(norm=norm))
    shared = Transformer(config_of(norm=norm, share_layers=True, embedding_size=4))
    assert len(shared.blocks) == 1
    assert len(apart.blocks) == 3
    assert len(shared.position.scoring) == 3
    assert shared.embeddings.weight.shape == (13, 4)
    # One layer's weights three times in a row is what sharing computes.
    tall = Transformer(config_of(norm=norm, embedding_size=4))
    state = shared.state_dict()
    tall.load_state_dict({
        name: state[name.replace("blocks.1.", "blocks.0.").replace("blocks.2.", "blocks.0.")]
        for name in tall.state_dict()
    })  # fmt: skip
    x = tokens(2, 7)
    torch.testing.assert_close(tall(x), shared(x))


@pytest.mark.parametrize("layers", ["each", "shared", "first"])
@pytest.mark.parametrize("name", ["tisa", "shaw", "floater"])
def test_layers_that_have_positions(name, layers):
    model = Transformer(config_of(position=name, position_options={"layers": layers}))
    for p in model.position.parameters():
        torch.nn.init.normal_(p, 0.3, 0.3)
    prepared = model.position.prepare(tisa.positions.places_of(6))
    query, hidden = torch.randn(1, 2, 6, 8), torch.randn(1, 6, 16)
    found = []
    for layer in range(3):
        if name == "tisa":
            found.append(model.position.offset_scores(layer, prepared))
            assert (model.position.band(layer, torch.float32) is None) == (found[-1] is None)
        elif name == "shaw":
            found.append(model.position.dense_logits(layer, query, hidden, prepared))
        else:
            found.append(model.position.project(layer, prepared))
    assert [f is not None for f in found] == [True, layers != "first", layers != "first"]
    if layers == "shared":
        assert torch.equal(found[0], found[2])
    if layers == "each":
        assert not torch.equal(found[0], found[2])
    model(tokens(2, 6)).sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("embedding_size", [None, 4])
def test_language_model_is_tied(is_causal, embedding_size):
    model = LanguageModel(config_of(is_causal=is_causal, embedding_size=embedding_size))
    x = tokens(2, 7)
    logits = model(x)
    assert logits.shape == (2, 7, 13)
    hidden = model.transformer(x)
    some = torch.tensor([[True, False, True, False, False, False, True]] * 2)
    torch.testing.assert_close(model.head(hidden[some]), logits[some])
    assert "head" not in "".join(model.state_dict())
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_generate_equals_reading_everything_again():
    model = LanguageModel(config_of(is_causal=True, position="rotary")).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    x = tokens(2, 3)
    found = model.generate(x, 6)
    for length in range(3, 9):
        assert torch.equal(model(found[:, :length])[:, -1].argmax(-1), found[:, length])
    drawn = [
        model.generate(x, 6, temperature=2.0, generator=torch.Generator().manual_seed(s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_activation_checkpointing_changes_no_gradient():
    model = Transformer(config_of(hidden_dropout=0.1, attention_dropout=0.1))
    x, found = tokens(2, 7), []
    for on in (False, True):
        model.activation_checkpointing = on
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["tisa", "shaw", "tupe-a"])
def test_dropout_only_in_training(name):
    model = Transformer(config_of(position=name, hidden_dropout=0.3, attention_dropout=0.3))
    x = tokens(2, 7)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("layers", ["each", "first"])
@pytest.mark.parametrize("worth", [True, False])
def test_offset_scores_go_through_the_operator_with_their_band(worth, layers, monkeypatch):
    """With a band where it saves work: on a GPU, which is imagined here, for many keys."""
    from tisa.ops import scored
    from tisa.transformer import attention as module

    monkeypatch.setattr(module, "GPUS", ("cpu",))
    monkeypatch.setattr(scored, "FEW_KEYS", 6 if worth else 7)
    seen = []

    def spy(*arguments, **options):
        seen.append((arguments[3], options["band"]))
        return tisa.attention(*arguments, **options)

    monkeypatch.setattr(module, "attention", spy)
    model = Transformer(config_of(position="tisa", position_options={"layers": layers}))
    model(tokens(2, 7))
    for layer, (scores, band) in enumerate(seen):
        assert (scores is None) == (layers == "first" and layer > 0)
        assert (band is not None) == (worth and scores is not None)
        if band is not None:
            assert scores.shape == (2, 13)
            assert torch.equal(band, model.position.band(layer, torch.float32))
    assert len(seen) == 3


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_shaw_makes_no_tensor_of_pairs_times_width():
    """The largest tensor of forward and backward is (heads, queries, 2·keys), not × head width."""
    length, width = 200, 32
    layer = tisa.SelfAttention(width, 1, position="shaw")
    with Largest() as largest:
        layer(torch.randn(1, length, width)).sum().backward()
    assert largest.elements <= 2 * length * (length + 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_shaw_reads_long_inputs_without_a_tensor_of_pairs(monkeypatch, is_causal):
    monkeypatch.setattr("tisa.transformer.attention.WEIGHTS_AT_ONCE", 2 * 2 * 1000)
    layer = tisa.SelfAttention(16, 2, position="shaw", is_causal=is_causal)
    for table in (layer.position.key_table, layer.position.value_table):
        torch.nn.init.normal_(table)
    x, mask = torch.randn(2, 200, 16), torch.ones(2, 200, dtype=torch.bool)
    mask[1, 50:] = False
    # With gradients all at once.
    wanted = layer(x, attention_mask=mask).detach()
    with torch.no_grad(), Largest() as largest:
        found = layer(x, attention_mask=mask)
    torch.testing.assert_close(found, wanted)
    # Five queries at a time: less than the hidden states, 160,000 otherwise.
    assert largest.elements < 7000
    if is_causal:
        cache = Cache()
        with torch.no_grad():
            parts = [layer(y, cache=cache) for y in x.split([37, 100, 63], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), layer(x).detach())


def test_shared_position_and_cache_of_a_transformer_of_ones_own():
    config = PositionConfig(hidden_size=16, num_attention_heads=2, is_causal=True)
    position = build_position("rotary", config)
    layers = [
        tisa.SelfAttention(16, 2, position=position, layer=n, is_causal=True) for n in range(2)
    ]
    assert layers[0].position is layers[1].position
    x, cache = torch.randn(2, 5, 16), Cache()
    full = layers[1](layers[0](x))
    found = [layers[1](layers[0](y, cache=cache), cache=cache) for y in x.split(2, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), full)
    assert cache.length == 5


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: Transformer(config_of(position="tisaa")), "did you mean tisa"),
        (lambda: Transformer(config_of(position="zzz")), "must be among none, sinusoidal"),
        (
            lambda: Transformer(config_of(position_options={"kernels": 3})),
            "among init, layers, num",
        ),
        (lambda: Transformer(config_of(position_options={"layers": "x"})), '"each", "shared"'),
        (lambda: config_of(hidden_size=15), "multiple of num_attention_heads"),
        (lambda: config_of(norm="both"), 'norm must be "pre" or "post"'),
        (lambda: config_of(vocab_size=0), "vocab_size must be at least 1"),
        (lambda: config_of(hidden_dropout=1.0), "hidden_dropout must lie in"),
        (lambda: config_of(max_position_embeddings=0), "max_position_embeddings must be at least"),
        (lambda: Transformer(config_of())(), "got neither"),
        (lambda: Transformer(config_of())(tokens(7)), "must be .batch, length, hidden."),
        (lambda: Transformer(config_of())(tokens(1, 7), cache=Cache()), "None in an encoder"),
        (lambda: cached(tokens(2, 3), tokens(1, 1)), "as many sequences as the input, 1, got 2"),
        (lambda: masked(torch.ones(1, 6, dtype=torch.bool)), r"\(1, 7\).*got \(1, 6\)"),
        (lambda: masked(torch.ones(1, 7)), "True or 1 for tokens"),
        (lambda: packed(tokens(1, 7), [0, 7], 7), "without a batch axis"),
        (lambda: packed(tokens(7), [0, 5], 7), "must end with the number of tokens, 7, got 5"),
        (lambda: packed(tokens(7), [], 7), r"after a leading 0, got shape \(0,\)"),
        (lambda: packed(tokens(7), [[0, 7]], 7), r"after a leading 0, got shape \(1, 2\)"),
        (lambda: packed(tokens(7), [0, 7], None), "max_seqlen must be the longest"),
        (lambda: packed(tokens(7), [0, 7], 5), "max_seqlen must be at least"),
        (lambda: LanguageModel(config_of()).generate(tokens(1, 2), 3), "needs a decoder"),
        (lambda: LanguageModel(config_of(is_causal=True)).generate(tokens(2), 3), r"shape \(2,\)"),
        (lambda: tisa.SelfAttention(16, 3), "multiple of num_attention_heads"),
        (lambda: tisa.SelfAttention(16, 2, position="rotary", layer=1), "pass the Position"),
        (lambda: tisa.SelfAttention(2, 2, position="rotary"), "even width"),
        (
            lambda: tisa.SelfAttention(4, 2, position="rotary", position_options={"base": 0}),
            "base must be above 0, got 0",
        ),
        (
            lambda: tisa.SelfAttention(
                16, 2, position=build_position("none", PositionConfig(16, 4))
            ),
            "made for hidden_size 16 and num_attention_heads 2, got 16 and 4",
        ),
        (
            lambda: tisa.SelfAttention(
                16, 2, position=build_position("t5", PositionConfig(16, 2)), is_causal=True
            ),
            "made for is_causal=True, got False",
        ),
    ],
)
def test_errors_say_what_to_do(wrong, error):
    with pytest.raises((ValueError, TypeError), match=error):
        wrong()


@pytest.mark.parametrize("name", ["tisa", "absolute", "shaw", "tupe-a", "floater", "none"])
@pytest.mark.parametrize(
    ("ends", "longest", "error"),
    [
        ([3, 7], 7, r"cu_seqlens must rise from 0, got \[3, 7\]"),
        ([0, 5, 3, 7], 7, r"cu_seqlens must rise from 0, got \[0, 5, 3, 7\]"),
        ([0, 1, 7], 5, "max_seqlen must be at least the longest sequence's length, 6, got 5"),
        ([0, 1, 7], -1, "max_seqlen must be at least the longest sequence's length, 6, got -1"),
    ],
)
def test_a_packed_batch_that_cannot_be_is_refused(name, ends, longest, error):
    with pytest.raises(ValueError, match=error):
        packed(tokens(7), ends, longest, position=name)


def masked(mask):
    return Transformer(config_of())(tokens(1, 7), attention_mask=mask)


def cached(*pieces):
    model, cache = Transformer(config_of(is_causal=True)), Cache()
    return [model(piece, cache=cache) for piece in pieces]


def packed(ids, ends, longest, **values):
    ends = torch.tensor(ends, dtype=torch.int32)
    return Transformer(config_of(**values))(ids, cu_seqlens=ends, max_seqlen=longest)


def test_the_snippets_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/methods.md").read_text(), re.S):
        exec(compile(snippet, "docs/methods.md", "exec"), {})
    assert (tmp_path / "model" / "model.safetensors").exists()
