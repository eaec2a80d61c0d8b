"""A logit that no token has: against a softmax with one column more, whatever else is asked."""

import pytest
import torch

import tisa
from small_transformer import config_of, tokens
from tisa.positions import resolve
from tisa.transformer import Cache, LanguageModel, SelfAttention, Transformer, load, save
from tisa.transformer.sinks import with_sinks


def with_a_column(query, key, value, bias, sinks):
    """Return softmax over the keys and one column more, as gpt-oss writes it."""
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, column), -1).softmax(-1)[..., :-1] @ value


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_output_and_gradients_are_those_of_one_more_column(backend, is_causal, queries):
    query, key, value = drawn(2, 3, queries, 4), drawn(2, 3, 9, 4), drawn(2, 3, 9, 4)
    scoring, sinks = tisa.TISA(3).double(), drawn(3)
    wanted = (query, key, value, sinks, *scoring.parameters())
    bias = scoring.matrix(queries, 9)
    if is_causal:
        ahead = torch.ones(queries, 9).triu(10 - queries).bool()
        bias = bias.masked_fill(ahead, -torch.inf)
    expected = with_a_column(query, key, value, bias, sinks)
    output, lse = tisa.attention(
        query, key, value, scoring, is_causal=is_causal, return_lse=True, backend=backend
    )
    found = with_sinks(output, lse, sinks)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, wanted, cotangent),
        torch.autograd.grad(expected, wanted, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_extreme_logits_and_queries_that_see_nothing():
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2, :] = False
    sinks = torch.tensor([-1e4, 1e4], requires_grad=True)
    query.requires_grad_()
    output, lse = tisa.attention(query, key, value, attn_mask=mask, return_lse=True)
    found = with_sinks(output, lse, sinks)
    torch.testing.assert_close(found[:, 0], output[:, 0])
    assert not found[:, 1].any()
    assert not found[:, :, 2].any()
    found.sum().backward()
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(sinks.grad).all()


def model_of(name, cls=Transformer, **values):
    values = {"is_causal": resolve(name).causal_only is not None, **values}
    model = cls(config_of(position=name, sinks=True, **values)).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.05, 0.3)
    return model


# The fused operator, logits of pairs, the weights themselves, scores of the key.
KINDS = ["tisa", "tupe-r", "shaw", "fox"]


@pytest.mark.parametrize("name", KINDS)
def test_in_a_layer_with_any_method(name):
    is_causal = name == "fox"
    layer = SelfAttention(8, 2, position=name, sinks=True, is_causal=is_causal).double()
    plain = SelfAttention(8, 2, position=name, is_causal=is_causal).double()
    layer.attention.sinks.data.copy_(torch.tensor([0.7, -1.3]))
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n != "attention.sinks"})
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    logits = layer.logits(x)
    if is_causal:
        logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    shares = (logits.logsumexp(-1) - layer.attention.sinks[:, None]).sigmoid()
    # What every head gave before is multiplied: with an identity for the last map one sees it.
    for module in (layer, plain):
        module.attention.output.weight.data.copy_(torch.eye(8))
        module.attention.output.bias.data.zero_()
    expected = plain(x).unflatten(-1, (2, 4)) * shares.transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(layer(x), expected.flatten(-2))
    layer(x).square().sum().backward()
    assert layer.attention.sinks.grad.abs().min() > 0


@pytest.mark.parametrize("name", KINDS)
def test_decoding_packed_and_padded(name):
    model = model_of(name, is_causal=True)
    x, cache = tokens(2, 10), Cache()
    with torch.no_grad():
        full = model(x)
        found = [model(piece, cache=cache) for piece in x.split([4, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(found, 1), full)
        ends = torch.tensor([0, 3, 10], dtype=torch.int32)
        packed = model(x[0], cu_seqlens=ends, max_seqlen=7)
        torch.testing.assert_close(packed[:3], full[0, :3])
        torch.testing.assert_close(packed[3:], model(x[:1, 3:])[0])
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[0, 6:] = False
        torch.testing.assert_close(model(x, attention_mask=mask)[0, :6], full[0, :6])


def test_dropout_leaves_its_mean():
    layer = SelfAttention(8, 2, position="none", sinks=True, attention_dropout=0.3).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    expected = layer.eval()(x)
    mean = layer.train()(x.expand(20_000, -1, -1)).mean(0, keepdim=True)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.02)


def test_saved_counted_and_begun(tmp_path):
    model = LanguageModel(config_of(sinks=True))
    plain = LanguageModel(config_of())
    assert model.transformer.num_parameters() == (
        plain.transformer.num_parameters()[0], plain.transformer.num_parameters()[1] + 3 * 2
    )  # fmt: skip
    assert 0 < model.transformer.blocks[0].attention.sinks.abs().max() < 0.2
    save(model, tmp_path)
    again, x = load(tmp_path), tokens(2, 7)
    assert again.config.sinks
    with torch.no_grad():
        assert torch.equal(again(x), model.eval()(x))


@pytest.mark.unchecked
def test_refused():
    with pytest.raises(TypeError, match="sinks must be True or False, got 1"):
        config_of(sinks=1)


@pytest.mark.full
@pytest.mark.unchecked
def test_compiled():
    torch._dynamo.reset()
    model, x = model_of("tisa"), tokens(2, 7)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
