"""A fused MPNet is the stock model: numbers, gradients, files."""

import copy
import pickle

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tisa
from fused_alibi_kinds import assert_close
from tisa.hf.fused import mpnet
from tisa.hf.fused.models import fused_modules

SIZES = dict(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=256, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, pad_token_id=1,
)  # fmt: skip


def stock(dtype=torch.float64, heads=4):
    """Return a tiny model in which positions and attention matter."""
    torch.manual_seed(0)
    config = transformers.MPNetConfig(
        **SIZES | {"num_attention_heads": heads, "hidden_size": 8 * heads}
    )
    model = transformers.MPNetForMaskedLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "relative_attention_bias" in name:
                p.normal_(0.0, 2.0)
            elif p.ndim == 2:
                p.mul_(4.0)
    return model


def both(dtype=torch.float64, heads=4):
    """Return a stock model and a fused one of the same weights."""
    return stock(dtype, heads), tisa.hf.fuse(stock(dtype, heads))


def inputs(padding="none", batch=3, length=150):
    """Return tokens, more than the buckets tell apart, of which some are padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 60, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        hidden = {"right": slice(length - 7, None), "left": slice(0, 7), "holes": slice(3, 9)}
        mask[1, hidden[padding]] = 0
    ids = ids.masked_fill(mask == 0, 1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def answer(model, given):
    """Return the logits of what is no padding, and the loss."""
    made = model(**given)
    return made.logits[given["attention_mask"].bool()], made.loss


def gradients(model, given):
    """Return the gradients of every parameter, of a loss that is not rounded to float32."""
    model.zero_grad(set_to_none=True)
    logits = answer(model, given)[0]
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("heads", [4, 6])
def test_outputs_and_gradients_are_stocks(padding, heads):
    model, fused = both(heads=heads)
    given = inputs(padding)
    for one, other in zip(answer(fused, given), answer(model, given), strict=True):
        assert_close(one, other)
    theirs, ours = gradients(model.train(), given), gradients(fused.train(), given)
    assert ours.keys() == theirs.keys()
    assert any("relative_attention_bias" in name for name in ours)
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, name)


def test_positions_matter_in_these_tests():
    model, given = stock(), inputs()
    before = answer(model, given)[0]
    with torch.no_grad():
        model.mpnet.encoder.relative_attention_bias.weight.zero_()
    assert (answer(model, given)[0] - before).abs().max() > 1e-2 * before.abs().max()


def test_outside_the_band_is_one_bucket():
    offsets = torch.arange(-600, 601)
    buckets = mpnet.MPNetEncoderFused.buckets(stock().mpnet.encoder, offsets)
    lowest, highest = mpnet.MPNetFused.band_ends
    assert len(buckets[offsets <= lowest].unique()) == 1
    assert len(buckets[offsets >= highest].unique()) == 1
    # All of 32 but that of tokens that come later by nothing.
    assert len(buckets[(offsets >= lowest) & (offsets <= highest)].unique()) == 31


def test_float32_is_stocks():
    model, fused = both(torch.float32)
    given = inputs("left")
    assert_close(answer(fused, given)[0], answer(model, given)[0])


@pytest.mark.parametrize("padding", ["none", "left"])
def test_weights_of_attention_on_request(padding):
    model, fused = both()
    given = inputs(padding)
    ours, theirs = (one(**given, output_attentions=True) for one in (fused, model))
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert_close(one, other)
    assert len(ours.attentions) == 2
    assert_close(ours.logits, theirs.logits)
    assert fused(**given).attentions is None


@pytest.mark.parametrize("weights", [False, True])
def test_a_mask_of_the_callers_with_four_dimensions(weights):
    model, fused = both()
    ids = inputs()["input_ids"]
    drawn = torch.randn(3, 1, 150, 150, generator=torch.Generator().manual_seed(2)).double()
    mask = drawn.masked_fill(drawn > 1, torch.finfo(torch.float64).min)
    ours, theirs = (
        one(ids, attention_mask=mask, output_attentions=weights).logits for one in (fused, model)
    )
    assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"give zeros and torch\.finfo"):
        fused(ids, attention_mask=drawn > 1)


def test_dropout_of_weights_is_the_operators(monkeypatch):
    told, attend = [], mpnet.attend
    monkeypatch.setattr(
        mpnet, "attend", lambda *a, **kw: told.append(kw["dropout"]) or attend(*a, **kw)
    )
    _, fused = both()
    for module in fused_modules(fused)[1:]:
        module.dropout.p = 0.3
    fused(**inputs())
    fused.train()(**inputs()).loss.backward()
    assert told == [0.0, 0.0, 0.3, 0.3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    # transformers has it not for MPNet; by hand, then.
    model, fused = both()
    given = inputs("left")
    for layer in fused.mpnet.encoder.layer:
        whole = layer.forward

        def again(*args, whole=whole, **kwargs):
            return checkpoint(lambda *a: whole(*a, **kwargs), *args, use_reentrant=reentrant)

        layer.forward = again
    found = gradients(fused, given)
    for name, gradient in gradients(model, given).items():
        assert_close(found[name], gradient, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_half_precision_is_no_worse_than_stocks(how, dtype):
    given = inputs("right")
    exact = answer(stock(), given)[0]
    model, fused = both(torch.float32)
    if how == "weights":
        model, fused = model.to(dtype), fused.to(dtype)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        ours, theirs = answer(fused, given)[0], answer(model, given)[0]
    assert ours.dtype == theirs.dtype
    error, allowed = ((one.double() - exact).norm() for one in (ours, theirs))
    assert error <= 1.5 * allowed


@pytest.mark.full
@pytest.mark.unchecked
@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiles_into_one_graph(padding):
    model, fused = both()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for length in (137, 123):
        given = inputs(padding, length=length)
        out = compiled(**given)
        assert_close(out.logits[given["attention_mask"].bool()], answer(model, given)[0])
    out.loss.backward()
    answer(model, given)[1].backward()
    for one, other in zip(fused.parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            assert_close(one.grad, other.grad, allowed=1e-6)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return out


@pytest.mark.unchecked
def test_nothing_is_as_large_as_the_square_of_the_length():
    length = 1536
    config = transformers.MPNetConfig(**SIZES | {"max_position_embeddings": length + 2})
    fused = tisa.hf.fuse(transformers.MPNetForMaskedLM(config))
    given = inputs("right", batch=2, length=length)
    with Largest() as seen:
        answer(fused, given)[1].backward()
    assert seen.largest < length**2 / 2
    with Largest() as seen, torch.no_grad():
        tisa.hf.unfuse(fused)(**given)
    assert seen.largest > length**2


def test_saved_models_are_stocks(tmp_path):
    model, fused = both()
    given = inputs()
    assert fused.state_dict().keys() == model.state_dict().keys()
    fused.save_pretrained(tmp_path / "fused")
    model.save_pretrained(tmp_path / "stock")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("fused", "stock")]
    assert configs[0] == configs[1]
    loaded = type(model).from_pretrained(tmp_path / "fused").double().eval()
    assert not fused_modules(loaded)
    assert_close(answer(loaded, given)[0], answer(model, given)[0])
    assert_close(answer(tisa.hf.fuse(loaded), given)[0], answer(fused, given)[0])


def test_unfused_is_what_it_was():
    model = stock()
    given = inputs("left")
    expected = answer(model, given)[0]
    classes = [type(m) for m in model.modules()]
    names = [sorted(vars(m)) for m in model.modules()]
    assert tisa.hf.fuse(model) is model
    assert len(fused_modules(model)) == 3
    answer(model, given)
    assert tisa.hf.fuse(model) is model
    assert tisa.hf.unfuse(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] == names
    assert model.config._attn_implementation == "eager"
    assert torch.equal(answer(model, given)[0], expected)


def test_copies_and_pickles_stay_fused():
    _, fused = both()
    given = inputs("left")
    expected = answer(fused, given)[0]
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert len(fused_modules(other)) == 3
        assert torch.equal(answer(other, given)[0], expected)


def test_with_another_name_it_is_the_stock_model():
    model, fused = both()
    given = inputs("left")
    fused.config._attn_implementation = "eager"
    assert torch.equal(answer(fused, given)[0], answer(model, given)[0])


def test_the_operators_name_alone_is_refused_and_fuse_is_named():
    model, given = stock(), inputs()
    model.config._attn_implementation = "tisa"
    with pytest.raises(ValueError, match=r"would be ignored.*call tisa\.hf\.fuse\(model\)"):
        model(**given)
    assert_close(answer(tisa.hf.fuse(model), given)[0], answer(stock(), given)[0])


def test_refusals_come_before_anything_changes():
    converted = tisa.hf.convert(stock(torch.float32), positions="keep", init="zero")
    for model, reason in (
        (stock().mpnet.encoder.layer, "cannot be fused alone: the MPNetEncoder"),
        (converted, r"converted by tisa\.hf\.convert, and is on the operator already"),
    ):
        classes = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=reason):
            tisa.hf.fuse(model)
        assert [type(m) for m in model.modules()] == classes
