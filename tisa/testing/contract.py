"""What every position method keeps to, in a layer and in a transformer."""

import copy
import pickle
from typing import Any

import pytest
import torch

import tisa
from tisa.positions import Given, Position, PositionConfig, build_position, resolve
from tisa.transformer import Cache, LanguageModel, Transformer, TransformerConfig
from tisa.transformer.attention import At
from tisa.transformer.forward_pass import ForwardPass

VOCABULARY, HIDDEN, HEADS, LAYERS, LIMIT = 13, 16, 2, 2, 12


def for_decoders(position: Given) -> bool:
    """Return whether the method is for decoders alone."""
    return resolve(position).causal_only is not None


def config_of(position: Given) -> PositionConfig:
    """Return sizes of a transformer that can have the method."""
    return PositionConfig(HIDDEN, HEADS, LAYERS, LIMIT, is_causal=for_decoders(position))


def layer_of(position: Given, **values: Any) -> tisa.SelfAttention:
    """Return a layer with the method, of an encoder if the method can be in one."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": LIMIT}
    values = {**sizes, "is_causal": for_decoders(position), **values}
    return tisa.SelfAttention(position=position, **values)


def model_of(position: Given, cls: Any = Transformer, **values: Any) -> Any:
    """Return a model with the method and large weights, an encoder if the method can be in one."""
    chosen = resolve(position)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "max_position_embeddings": LIMIT}  # fmt: skip
    values = {**sizes, "is_causal": for_decoders(position), **values}
    if chosen.causal_only is not None and not values["is_causal"]:
        pytest.skip(f"{chosen.name} is for decoders: {chosen.causal_only}")
    torch.manual_seed(1)
    model = cls(TransformerConfig(position=position, **values))
    # Large weights, so that nothing is right only because it is nearly zero.
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.05, 0.3)
    return model


def tokens(*shape: int) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(0, VOCABULARY, shape)


def test_every_hook_is_asked(position: Given) -> None:
    """A hook that the method has and the layer would never ask for is silently ignored."""
    method = build_position(position, config_of(position))
    hooks = ("content", "dense_logits", "key_scores", "values")
    has = {hook for hook in hooks if getattr(type(method), hook) is not getattr(Position, hook)}
    assert method.dense or not has & {"content", "dense_logits"}
    assert method.needs_weights or "values" not in has
    assert method.scores_keys or "key_scores" not in has


def test_an_encoder_refuses_what_is_for_decoders(position: Given) -> None:
    if for_decoders(position):
        with pytest.raises(ValueError, match=r"is_causal must be True .*; in an encoder take"):
            layer_of(position, is_causal=False)
    else:
        layer_of(position, is_causal=False)


def test_learned_vectors_are_of_every_position(position: Given) -> None:
    """What looks at a table of positions (pretraining does) asks the method for it."""
    found = build_position(position, config_of(position)).vectors()
    assert found is None or found.shape == (LIMIT, HIDDEN)


@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (3, 12)])
def test_shapes(position: Given, shape: tuple[int, ...]) -> None:
    assert layer_of(position)(torch.randn(*shape, HIDDEN)).shape == (*shape, HIDDEN)
    assert model_of(position)(tokens(*shape)).shape == (*shape, HIDDEN)
    logits = layer_of(position).logits(torch.randn(*shape, HIDDEN))
    assert logits.shape == (shape[0], HEADS, shape[1], shape[1])


def test_no_tokens(position: Given) -> None:
    assert layer_of(position)(torch.randn(2, 0, HIDDEN)).shape == (2, 0, HIDDEN)
    model, x = model_of(position).eval(), tokens(2, 7)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        assert model(x[:, :0]).shape == (2, 0, HIDDEN)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(position: Given, dtype: torch.dtype) -> None:
    layer = layer_of(position)
    x = torch.randn(2, 9, HIDDEN).to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()(x.double())
        found = layer.to(dtype)(x)
    assert found.dtype == dtype
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < 40 * torch.finfo(dtype).eps


def test_autocast(position: Given) -> None:
    layer = layer_of(position)
    x = torch.randn(2, 9, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), layer(x), rtol=0.1, atol=0.1)
    found.float().sum().backward()


def test_devices(position: Given) -> None:
    model = model_of(position).to("meta")
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"meta"}
    found = model(tokens(2, 7).to("meta"), attention_mask=torch.ones(2, 7, device="meta").bool())
    assert found.device.type == "meta"
    assert found.shape == (2, 7, HIDDEN)


def test_gradients(position: Given) -> None:
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "max_position_embeddings": 4}
    layer = layer_of(position, **sizes).double()
    parameters = dict(layer.named_parameters())
    for p in parameters.values():
        torch.nn.init.normal_(p, 0.4, 0.3)
    x = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    values = [p.detach().requires_grad_() for p in parameters.values()]
    assert torch.autograd.gradcheck(run, (x, *values), atol=1e-6, rtol=1e-3, fast_mode=True)


def test_torch_func(position: Given) -> None:
    """Gradients of each sample, an ensemble of models, and forward-mode derivatives."""
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "max_position_embeddings": 5}
    layers = [layer_of(position, **sizes) for _ in range(2)]
    for layer in layers:
        for p in layer.double().parameters():
            torch.nn.init.normal_(p, 0.4, 0.3)
    x, across = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)

    def loss(parameters: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(layers[0], parameters, (x,)).square().sum()

    def gradients(layer: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        own = dict(layer.named_parameters())
        return dict(zip(own, torch.autograd.grad(loss(own, x), list(own.values())), strict=True))

    own = {n: p.detach() for n, p in layers[0].named_parameters()}
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, x[0].unsqueeze(1))
    for i in range(3):
        for key, expected in gradients(layers[0], x[0, i : i + 1]).items():
            torch.testing.assert_close(each[key][i], expected, rtol=1e-9, atol=1e-9)
    stacked, _ = torch.func.stack_module_state(layers)
    ensemble = torch.vmap(torch.func.grad(loss))(stacked, x)
    for i, layer in enumerate(layers):
        for key, expected in gradients(layer, x[i]).items():
            torch.testing.assert_close(ensemble[key][i], expected, rtol=1e-9, atol=1e-9)
    along = torch.func.jvp(lambda x: loss(own, x), (x[0],), (across[0],))[1]
    expected = (torch.func.grad(loss, argnums=1)(own, x[0]) * across[0]).sum()
    torch.testing.assert_close(along, expected, rtol=1e-9, atol=1e-9)


def test_every_positional_parameter_learns(position: Given) -> None:
    model = model_of(position, LanguageModel)
    model(tokens(4, LIMIT)).square().mean().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert torch.isfinite(p.grad).all(), key
        assert p.grad.abs().sum() > 0 or key.endswith("key.bias"), key


def test_determinism(position: Given) -> None:
    one, other, x = model_of(position), model_of(position), tokens(2, 9)
    assert torch.equal(one(x), other(x))
    assert torch.equal(one(x), one(x))
    torch.manual_seed(3)
    first = build_position(position, config_of(position)).state_dict()
    torch.manual_seed(3)
    second = build_position(position, config_of(position)).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_state_dict_round_trip(position: Given) -> None:
    model, x = model_of(position), tokens(2, 9)
    other = Transformer(model.config)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(x), other(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_longer_input_works_or_names_the_limit(position: Given) -> None:
    model = model_of(position).eval()
    limit = model.position.max_length
    assert limit in (None, LIMIT)
    with torch.no_grad():
        if limit is None:
            assert torch.isfinite(model(tokens(1, 3 * LIMIT))).all()
        else:
            model(tokens(1, limit))
            with pytest.raises(ValueError, match=f"at most {limit} tokens .* got {limit + 1}"):
                model(tokens(1, limit + 1))


@pytest.mark.parametrize("shared", [False, True])
def test_cache_equals_full_pass(position: Given, shared: bool) -> None:
    model = model_of(position, is_causal=True, share_layers=shared).double().eval()
    x = tokens(2, 10)
    with torch.no_grad():
        full = model(x)
        for pieces in ([1] * 10, [4, 1, 5], [10]):
            cache = Cache()
            found = [model(piece, cache=cache) for piece in x.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(found, dim=1), full, rtol=1e-9, atol=1e-9)
            assert cache.length == 10


def test_a_decoder_sees_nothing_ahead(position: Given) -> None:
    model = model_of(position, is_causal=True).double().eval()
    x = tokens(1, 9)
    other = x.clone()
    other[0, 6:] = (other[0, 6:] + 1) % VOCABULARY
    with torch.no_grad():
        one, two = model(x), model(other)
    assert torch.equal(one[:, :6], two[:, :6])
    assert not torch.allclose(one[:, 6:], two[:, 6:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_nothing(position: Given, is_causal: bool) -> None:
    model = model_of(position, is_causal=is_causal).double().eval()
    x, length = tokens(2, 10), 6
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, length:] = False
    with torch.no_grad():
        alone, batch = model(x[:1, :length]), model(x, attention_mask=mask)
        torch.testing.assert_close(batch[:1, :length], alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(batch[1:], model(x[1:]), rtol=1e-9, atol=1e-9)
        assert torch.equal(batch, model(x, attention_mask=mask.long()))


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_do_not_see_each_other(position: Given, is_causal: bool) -> None:
    model = model_of(position, is_causal=is_causal).double()
    pieces = [tokens(length) for length in (5, 1, 9)]
    ends = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    packed = model(torch.cat(pieces), cu_seqlens=ends, max_seqlen=9)
    apart = torch.cat([model(piece[None])[0] for piece in pieces])
    torch.testing.assert_close(packed, apart, rtol=1e-9, atol=1e-9)
    packed.sum().backward()


def test_logits_are_what_the_softmax_is_taken_of(position: Given) -> None:
    layer = layer_of(position).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0.0, 0.5)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    logits = layer.logits(x)
    if layer.attention.is_causal:
        logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    weights = logits.softmax(-1)
    prepared = layer.position.prepare(tisa.positions.places_of(9))
    at = At(layer.position, 0, ForwardPass(prepared))
    _, _, value = layer.attention._project(layer.position.embed(x, prepared), at)
    mixed = weights @ value.transpose(1, 2)
    if layer.position.needs_weights:
        added = layer.position.values(0, weights, prepared)
        assert added is not None
        mixed = mixed + added
    expected = layer.attention.output(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)


# Where a graph breaks dynamo asks tensors for their gradient; it hides the warning, not the error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiles(position: Given) -> None:
    torch._dynamo.reset()
    model = model_of(position)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = tokens(2, 7)
    found = compiled(x)
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
    found.sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
def test_exports(position: Given, is_causal: bool) -> None:
    """Any batch and any length that the method has parameters for, without this package."""
    model = model_of(position, is_causal=is_causal).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=LIMIT)
    with torch.no_grad():
        program = torch.export.export(
            model, (tokens(2, 7),), dynamic_shapes=({0: batch, 1: length},)
        )
        exported = program.module()
        for shape in ((2, 7), (1, 3), (3, LIMIT)):
            x = tokens(*shape)
            torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-5)
    assert not [node for node in program.graph.nodes if "tisa" in str(node.target)]
