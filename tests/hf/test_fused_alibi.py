"""A fused BLOOM, MPT or Falcon is the stock model: numbers, gradients, tokens, files."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.falcon import modeling_falcon

import tisa
from fused_alibi_kinds import (
    FEW,
    KINDS,
    SIZES,
    Unrounded,
    answer,
    assert_close,
    bloom,
    both,
    falcon,
    gradients,
    inputs,
    mpt,
    stock,
)
from tiny import checkpoint_activations
from tisa.hf.fused import alibi
from tisa.hf.fused.models import fused_modules

WAYS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.fixture(params=FEW)
def kind(request):
    return request.param


@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("each", KINDS)
def test_outputs_and_gradients_are_stocks(each, padding):
    model, fused = both(each)
    given = inputs(padding)
    for one, other in zip(answer(fused, given), answer(model, given), strict=True):
        assert_close(one, other)
    theirs, ours = gradients(model.train(), given), gradients(fused.train(), given)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, name)


def test_without_a_mask_and_from_embeddings(kind):
    model, fused = both(kind)
    ids = inputs()["input_ids"]
    vectors = model.get_input_embeddings()(ids)
    for given in ({"input_ids": ids}, {"inputs_embeds": vectors}):
        with Unrounded():
            expected = model(**given).logits
        assert_close(fused(**given).logits, expected)


def test_positions_matter_in_these_tests(kind, monkeypatch):
    _, fused = both(kind)
    given = inputs()
    before = answer(fused, given)[0]
    monkeypatch.setattr(alibi.Sloped, "slopes", lambda self, like: torch.zeros(4, device="cpu"))
    assert (answer(fused, given)[0] - before).abs().max() > 1e-2 * before.abs().max()


def test_float32_is_stocks(kind):
    # Of so few tokens bfloat16 has all the places of 4 heads.
    model, fused = both(kind, torch.float32)
    given = inputs("left")
    seen = given["attention_mask"].bool()
    assert_close(fused(**given).logits[seen], model(**given).logits[seen])


def test_stock_falcon_rounds_places_and_counts_twice_where_ours_does_not():
    model, fused = (one.eval() for one in both("falcon", torch.float32))
    ids = torch.randint(3, 60, (1, 300))
    exact, ours = model.double()(ids).logits, fused.double()(ids).logits
    off = (exact - ours).abs().amax((0, 2))
    assert off[:256].max() < 1e-9 < 1e-5 < off[290:].max()
    with Unrounded():
        weighed = model(ids[:, :30], output_attentions=True).logits
    assert (weighed - exact[:, :30]).abs().max() > 1e-2 * exact.abs().max()


def generated(model, given, **settings):
    with Unrounded():
        return model.generate(
            given["input_ids"], attention_mask=given["attention_mask"], do_sample=False,
            **{"max_new_tokens": 50, "min_new_tokens": 50, **settings},
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_generated_tokens_are_stocks(kind, way):
    if kind == "mpt" and way == "static":
        pytest.skip("transformers' generation has no static cache for MPT")
    model, fused = both(kind)
    given = inputs("left", length=17)
    # Stock Falcon's ALiBi fits no static cache.
    theirs = generated(model, given, **({} if (kind, way) == ("falcon", "static") else WAYS[way]))
    ours = generated(fused, given, **WAYS[way])
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))


def static(model, length):
    return transformers.StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "holes"])
def test_piece_by_piece(kind, padding, cache):
    model, fused = both(kind)
    given = inputs(padding)
    real = given["attention_mask"]
    expected = answer(model, given)[0]
    past = static(fused, 48) if cache == "static" else transformers.DynamicCache()
    made = []
    for begin, end in ((0, 20), (20, 21), (21, 30), *((i, i + 1) for i in range(30, 37))):
        out = fused(
            given["input_ids"][:, begin:end],
            attention_mask=None if padding == "none" else real[:, :end],
            past_key_values=past,
        )
        made.append(out.logits)
    assert_close(torch.cat(made, 1)[real.bool()], expected)


def test_a_static_cache_begun_by_hand_is_stock_mpts():
    model, fused = both("mpt")
    ids = inputs()["input_ids"]
    made = []
    for one in (model, fused):
        past = static(one, 48)
        with Unrounded():
            parts = [one(x, past_key_values=past).logits for x in ids.split(13, 1)]
        made.append(torch.cat(parts, 1))
    assert_close(made[1], made[0])


def test_more_tokens_than_stock_mpt_has_places_for():
    fused = tisa.hf.fuse(mpt(max_seq_len=16).double())
    longer = mpt(max_seq_len=64).double()
    longer.load_state_dict(fused.state_dict())
    ids = inputs()["input_ids"]
    with Unrounded():
        assert_close(fused(ids).logits, longer(ids).logits)


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_weights_of_attention_on_request(kind, padding, monkeypatch):
    model, fused = both(kind)
    given = inputs(padding)
    seen = given["attention_mask"].bool()
    with Unrounded():
        ours = fused(**given, output_attentions=True)
        if kind == "falcon":
            # Where weights are wanted stock code adds ALiBi twice: half of it, then.
            whole = modeling_falcon.build_alibi_tensor
            monkeypatch.setattr(
                modeling_falcon, "build_alibi_tensor", lambda *a, **kw: whole(*a, **kw) / 2
            )
        theirs = model(**given, output_attentions=True)
    assert len(ours.attentions) == len(theirs.attentions) == 2
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        rows = seen[:, None, :].expand(one.shape[:3])
        assert_close(one[rows], other[rows])
    assert_close(ours.logits[seen], theirs.logits[seen])
    assert_close(ours.logits[seen], answer(fused, given)[0])
    assert fused(**given).attentions is None


def test_weights_with_a_static_cache(kind):
    _, fused = both(kind)
    given = inputs("left")
    with Unrounded():
        whole = fused(**given, output_attentions=True).attentions
        past = static(fused, 48)
        fused(given["input_ids"][:, :30], attention_mask=given["attention_mask"][:, :30],
              past_key_values=past)  # fmt: skip
        rest = fused(given["input_ids"][:, 30:], attention_mask=given["attention_mask"],
                     past_key_values=past, output_attentions=True).attentions  # fmt: skip
    for one, other in zip(rest, whole, strict=True):
        assert_close(one[..., :37], other[:, :, 30:])
        assert not one[..., 37:].any()


def test_dropout_of_weights_is_the_operators(kind, monkeypatch):
    told = []
    attention = alibi.attention
    monkeypatch.setattr(
        alibi, "attention", lambda *a, **kw: told.append(kw["dropout_p"]) or attention(*a, **kw)
    )
    fused = both(kind, torch.float32)[1]
    for module in fused.modules():
        if isinstance(module, alibi.SlopedAttention):
            if kind == "mpt":
                module.attn_dropout_p = 0.3
            else:
                module.attention_dropout.p = 0.3
    given = inputs()
    fused.eval()(**given)
    fused.train()(**given).loss.backward()
    assert told == [0.0, 0.0, 0.3, 0.3]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(kind, reentrant):
    model, fused = both(kind)
    given = inputs("left")
    expected = gradients(model, given)
    fused.train()
    checkpoint_activations(fused, use_reentrant=reentrant)
    if reentrant:
        fused.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients(fused, given)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, name)


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_half_precision_is_no_worse_than_stocks(kind, how, dtype, padding):
    given = inputs(padding)
    exact = answer(stock(kind), given)[0]
    model, fused = both(kind, torch.float32)
    seen = given["attention_mask"].bool()
    if how == "weights":
        model, fused = model.to(dtype), fused.to(dtype)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"), torch.no_grad():
        ours, theirs = fused(**given).logits[seen], model(**given).logits[seen]
    assert ours.dtype == theirs.dtype
    error, allowed = ((one.double() - exact).norm() for one in (ours, theirs))
    assert error <= 1.5 * allowed


@pytest.mark.unchecked
# BLOOM's own activation function.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd:DeprecationWarning")
@pytest.mark.full
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_compiles_into_one_graph(kind, padding):
    model, fused = both(kind)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for length in (37, 29):
        given = inputs(padding, length=length)
        expected = answer(model, given)
        out = compiled(**given)
        assert_close(out.logits[given["attention_mask"].bool()], expected[0])
    out.loss.backward()
    found = {n: p.grad for n, p in fused.named_parameters() if p.grad is not None}
    # The loss is transformers', in float32.
    for name, gradient in gradients(model, given).items():
        assert_close(found[name], gradient, name, allowed=1e-6)


@pytest.mark.full
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd:DeprecationWarning")
def test_compiles_with_a_static_cache(kind):
    model, fused = both(kind)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    given, past, made = inputs("left"), static(fused, 48), []
    for begin, end in ((0, 35), (35, 36), (36, 37)):
        mask = torch.nn.functional.pad(given["attention_mask"][:, :end], (0, 48 - end))
        with torch.no_grad():
            ids = given["input_ids"][:, begin:end]
            out = compiled(ids, attention_mask=mask, past_key_values=past)
        made.append(out.logits)
    logits = torch.cat(made, 1)[given["attention_mask"].bool()]
    assert_close(logits, answer(model, given)[0])


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
@pytest.mark.parametrize("padding", [pytest.param("none", marks=pytest.mark.full), "left", "holes"])
def test_nothing_is_as_large_as_the_square_of_the_length(kind, padding):
    length = 1536
    fused = tisa.hf.fuse(copy.deepcopy(KINDS[kind]()))
    given = inputs(padding, batch=3 if padding == "holes" else 2, length=length)
    with Largest() as seen:
        fused(**given).loss.backward()
    assert seen.largest < length**2 / 2
    if padding == "left":
        with Largest() as seen, torch.no_grad():
            tisa.hf.unfuse(fused).config.max_seq_len = length
            fused(**given)
        assert seen.largest > length**2


def test_saved_models_are_stocks(kind, tmp_path):
    model, fused = both(kind)
    given = inputs("left")
    assert fused.state_dict().keys() == model.state_dict().keys()
    fused.save_pretrained(tmp_path / "fused")
    model.save_pretrained(tmp_path / "stock")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("fused", "stock")]
    assert configs[0] == configs[1]
    loaded = type(model).from_pretrained(tmp_path / "fused").double().eval()
    assert not fused_modules(loaded)
    assert_close(answer(loaded, given)[0], answer(model, given)[0])
    assert_close(answer(tisa.hf.fuse(loaded), given)[0], answer(fused, given)[0])
    # A model without its head is of a class made here, which loads stock ones.
    fused.base_model.save_pretrained(tmp_path / "base")
    base = type(fused.base_model).from_pretrained(tmp_path / "base")
    assert type(base) is type(model.base_model)


def test_unfused_is_what_it_was(kind):
    model = stock(kind)
    given = inputs("left")
    expected = answer(model, given)[0]
    classes = [type(m) for m in model.modules()]
    names = [sorted(vars(m)) for m in model.modules()]
    implementation = model.config._attn_implementation
    fused = tisa.hf.fuse(model)
    assert fused is model
    assert len(fused_modules(model)) == (5 if kind == "mpt" else 3)
    answer(fused, given)
    assert tisa.hf.fuse(fused) is model
    assert tisa.hf.unfuse(fused) is model
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] == names
    assert model.config._attn_implementation == implementation
    assert torch.equal(answer(model, given)[0], expected)
    with pytest.raises(ValueError, match="is not fused"):
        tisa.hf.unfuse(model)


def test_another_model_of_the_class_does_not_notice(kind):
    bystander = stock(kind)
    given = inputs("left")
    before = answer(bystander, given)[0]
    answer(both(kind)[1], given)
    assert not fused_modules(bystander)
    assert torch.equal(answer(bystander, given)[0], before)


def test_copies_and_pickles_stay_fused(kind):
    _, fused = both(kind)
    given = inputs("left")
    expected = answer(fused, given)[0]
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert len(fused_modules(other)) == len(fused_modules(fused))
        assert torch.equal(answer(other, given)[0], expected)


def test_transformers_leaves_the_name_and_with_another_one_it_is_the_stock_model(kind):
    model, fused = both(kind)
    given = inputs("holes")
    # It only warns.
    fused.set_attn_implementation("eager")
    assert fused.config._attn_implementation == "tisa-fused"
    fused.config._attn_implementation = model.config._attn_implementation
    assert torch.equal(answer(fused, given)[0], answer(model, given)[0])


def test_what_was_made_without_autograd_trains(kind):
    model, fused = both(kind)
    given = inputs("holes")
    with torch.inference_mode():
        answer(fused, given)
    found = gradients(fused.train(), given)
    for name, gradient in gradients(model, given).items():
        assert_close(found[name], gradient, name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_train_alike(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    given = inputs("left")
    target = "Wqkv" if kind == "mpt" else "query_key_value"
    made = []
    for one in both(kind):
        torch.manual_seed(5)
        lora = peft.LoraConfig(
            target_modules=[target], r=4, init_lora_weights=False, fan_in_fan_out=False
        )
        made.append(peft.get_peft_model(one, lora).train())
    theirs, ours = (gradients(one, given) for one in made)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, name)


def test_hooks_of_accelerate_stay(kind, tmp_path):
    model = stock(kind)
    given = inputs("left")
    expected = answer(model, given)[0]
    model.save_pretrained(tmp_path)
    placed = type(model).from_pretrained(tmp_path, device_map={"": "cpu"}).double().eval()
    assert_close(answer(tisa.hf.fuse(placed), given)[0], expected)
    assert_close(answer(tisa.hf.unfuse(placed), given)[0], expected)


def test_refusals_come_before_anything_changes():
    rotary = falcon(alibi=False)
    eager = transformers.FalconForCausalLM._from_config(
        transformers.FalconConfig(**SIZES, hidden_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, alibi=True),
        attn_implementation="eager",
    )  # fmt: skip
    slow = bloom(pretraining_tp=2, slow_but_exact=True)
    for model, reason in (
        (rotary, "positions are rotary"),
        (eager, 'ALiBi is added twice.*load it with attn_implementation="sdpa"'),
        (slow, "slow_but_exact"),
        (bloom().transformer.h, "BloomAttention cannot be fused alone: the BloomModel"),
        (mpt().transformer.blocks, "cannot be fused alone: the MptModel"),
    ):
        classes = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=reason):
            tisa.hf.fuse(model)
        assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_masks_of_the_callers_with_four_dimensions_are_refused(kind, dtype):
    _, fused = both(kind)
    mask = torch.zeros(3, 1, 37, 37, dtype=dtype)
    with pytest.raises(ValueError, match=r"takes \(batch, keys\), 1 for a token"):
        fused(inputs()["input_ids"], attention_mask=mask)


def test_packed_batches_are_refused(kind):
    with pytest.raises(ValueError, match="does not say where examples end"):
        tisa.hf.PackedCollator(both(kind)[1])


def test_attention_to_later_tokens_is_refused(kind):
    _, fused = both(kind)
    fused.config.is_causal = False
    with pytest.raises(ValueError, match=r"sees no later tokens.*tisa\.hf\.unfuse"):
        fused(inputs()["input_ids"])


def test_the_operators_name_alone_is_refused_and_fuse_is_named(kind):
    model = stock(kind)
    model.config._attn_implementation = "tisa"
    given = inputs()
    with pytest.raises(ValueError, match=r"would be ignored.*call tisa\.hf\.fuse\(model\)"):
        model(**given)
    assert_close(answer(tisa.hf.fuse(model), given)[0], answer(stock(kind), given)[0])
    rotary = falcon(alibi=False)
    rotary.config._attn_implementation = "tisa"
    with pytest.raises(ValueError, match=r"would be ignored.*interface; take"):
        rotary(**given)
