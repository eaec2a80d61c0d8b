"""A fused T5 (mT5, UMT5, Switch, …) is the stock model: numbers, gradients, tokens, files."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import tisa
from fused_kinds import (
    ENCODERS,
    KINDS,
    PAIRS,
    answer,
    assert_close,
    both,
    gradients,
    inputs,
    stock,
)
from tiny import checkpoint_activations
from tisa.hf.fused.models import fused_modules

GENERATED = dict(max_new_tokens=50, min_new_tokens=50, do_sample=False)
WAYS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False, "max_new_tokens": 8, "min_new_tokens": 8},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def generated(model, given, **settings):
    torch.manual_seed(3)
    return model.generate(
        given["input_ids"],
        attention_mask=given["attention_mask"],
        **{**GENERATED, **settings},
        return_dict_in_generate=True,
        output_logits=True,
    )


def assert_same_tokens(ours, theirs):
    """Compare tokens, and the logits that they were chosen by."""
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
def test_outputs_and_gradients_are_stocks(kind, padding):
    model, fused = both(kind)
    given = inputs(kind, padding)
    found, expected = answer(fused, given), answer(model, given)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    for p in (model, fused):
        p.train()
    theirs = gradients(model, given)
    ours = gradients(fused, given)
    assert ours.keys() == theirs.keys()
    assert any("relative_attention_bias" in name for name in ours)
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, name)


def test_positions_matter_in_these_tests(kind):
    model = stock(kind)
    given = inputs(kind)
    before = answer(model, given)[0]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "relative_attention_bias" in name:
                p.zero_()
    assert (answer(model, given)[0] - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.unchecked
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PAIRS)
def test_generated_tokens_are_stocks(kind, way):
    model, fused = both(kind)
    given = inputs(kind, "left")
    ours = generated(fused, given, **WAYS[way])
    assert_same_tokens(ours, generated(model, given, **WAYS[way]))


@pytest.mark.unchecked
def test_sampling_and_assisted_generation():
    model, fused = both("t5")
    given = {name: value[:1] for name, value in inputs("t5").items()}
    ours = generated(fused, given, do_sample=True, top_k=20)
    assert_same_tokens(ours, generated(model, given, do_sample=True, top_k=20))
    helper = stock("flan")
    plain = generated(fused, given)
    helped = generated(fused, given, assistant_model=helper)
    assert torch.equal(helped.sequences, plain.sequences)


def test_the_decoder_of_pictures_with_a_cache():
    model, fused = both("pix2struct")
    given = inputs("pix2struct")
    seen = given["encoder_hidden_states"].double()
    for cache in ("dynamic", "static"):
        made = []
        for one in (model, fused):
            ids, past = given["input_ids"][:, :9], None
            if cache == "static":
                past = transformers.EncoderDecoderCache(
                    transformers.StaticCache(config=one.config, max_cache_len=16),
                    transformers.DynamicCache(config=one.config),
                )
            out = one(
                ids[:, :5], encoder_hidden_states=seen,
                past_key_values=past, use_cache=True,
            )  # fmt: skip
            steps = [out.logits[:, -1]]
            for i in range(5, 9):
                out = one(
                    ids[:, i : i + 1], encoder_hidden_states=seen,
                    past_key_values=out.past_key_values, use_cache=True,
                )  # fmt: skip
                steps.append(out.logits[:, -1])
            made.append(torch.stack(steps))
        assert_close(made[1], made[0], cache)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["t5", "umt5", "switch", "t5 encoder"])
def test_activation_checkpointing(kind, reentrant):
    model, fused = both(kind)
    given = inputs(kind, "right")
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


@pytest.mark.parametrize("kind", ["t5", "umt5", "pop2piano", "t5 encoder"])
def test_weights_of_attention_on_request(kind):
    model, fused = both(kind)
    model.set_attn_implementation("eager")
    given = inputs(kind, "left")
    ours, theirs = (
        one(**{k: v.to(one.dtype) if v.is_floating_point() else v for k, v in given.items()},
            output_attentions=True)
        for one in (fused, model)
    )  # fmt: skip
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        found, expected = getattr(ours, name, None), getattr(theirs, name, None)
        assert (found is None) == (expected is None)
        for one, other in zip(found or (), expected or (), strict=True):
            assert_close(one, other, name)
    assert_close(ours[0], theirs[0])


def test_float32_is_stocks(kind):
    model, fused = both(kind, torch.float32)
    given = inputs(kind, "left")
    assert_close(answer(fused, given)[0], answer(model, given)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_half_precision_is_no_worse_than_stocks(how, dtype):
    kind = "t5 encoder"
    model, fused = both(kind, torch.float32)
    given = inputs(kind, "right")
    exact = answer(stock(kind), given)[0]
    if how == "weights":
        model, fused = model.to(dtype), fused.to(dtype)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        ours, theirs = answer(fused, given)[0], answer(model, given)[0]
    assert ours.dtype == theirs.dtype
    error, allowed = ((one.double() - exact).norm() for one in (ours, theirs))
    assert error <= 1.5 * allowed


def test_half_precision_trains_the_table():
    model, fused = (one.to(torch.bfloat16).train() for one in both("t5 encoder"))
    given = inputs("t5 encoder")
    exact = gradients(stock("t5 encoder"), given)
    ours, theirs = gradients(fused, given), gradients(model, given)
    for name in exact:
        if "relative_attention_bias" in name:
            errors = [(g[name].double() - exact[name]).norm() for g in (ours, theirs)]
            assert errors[0] <= 1.5 * errors[1]


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["t5", pytest.param("umt5 encoder", marks=pytest.mark.full)])
def test_compiles_into_one_graph(kind):
    model, fused = both(kind)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for length in (37, 23):
        given = inputs(kind, "right", length=length)
        with torch.no_grad():
            expected = answer(model, given)[0]
        ours = answer(compiled, given)
        assert_close(ours[0].detach(), expected)
    ours[1].backward()
    found = {n: p.grad for n, p in fused.named_parameters() if p.grad is not None}
    for name, gradient in gradients(model, given).items():
        assert_close(found[name], gradient, name)


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
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_nothing_is_as_large_as_the_square_of_the_length(kind):
    length = 1536
    model, fused = both(kind, torch.float32)
    given = inputs(kind, "right", batch=2, length=length, targets=length)
    with Largest() as seen:
        answer(fused, given)[1].backward()
    assert seen.largest < length**2 / 2
    with Largest() as seen, torch.no_grad():
        model(**given)
    assert seen.largest > length**2


def test_saved_models_are_stocks(kind, tmp_path):
    model, fused = both(kind)
    given = inputs(kind)
    assert fused.state_dict().keys() == model.state_dict().keys()
    fused.save_pretrained(tmp_path / "fused")
    model.save_pretrained(tmp_path / "stock")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("fused", "stock")]
    assert configs[0] == configs[1]
    loaded = type(model).from_pretrained(tmp_path / "fused").double().eval()
    assert not fused_modules(loaded)
    assert_close(answer(loaded, given)[0], answer(model, given)[0])
    again = tisa.hf.fuse(loaded)
    assert_close(answer(again, given)[0], answer(fused, given)[0])


def test_unfused_is_what_it_was(kind):
    model = stock(kind)
    given = inputs(kind, "left")
    expected = answer(model, given)[0]
    classes = [type(m) for m in model.modules()]
    implementations = [
        m.config._attn_implementation for m in model.modules() if hasattr(m, "config")
    ]
    names = [sorted(vars(m)) for m in model.modules()]
    fused = tisa.hf.fuse(model)
    assert fused is model
    assert [type(m) for m in model.modules()] != classes
    answer(fused, given)
    assert tisa.hf.fuse(fused) is model
    assert tisa.hf.unfuse(fused) is model
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] == names
    after = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    assert after == implementations
    assert torch.equal(answer(model, given)[0], expected)
    with pytest.raises(ValueError, match="is not fused"):
        tisa.hf.unfuse(model)


def test_another_model_of_the_class_does_not_notice():
    bystander = stock("t5")
    given = inputs("t5")
    before = answer(bystander, given)[0]
    both("t5")
    assert not fused_modules(bystander)
    assert bystander.config._attn_implementation != "tisa-fused"
    assert torch.equal(answer(bystander, given)[0], before)


def test_copies_and_pickles_stay_fused(kind):
    _, fused = both(kind)
    given = inputs(kind)
    expected = answer(fused, given)[0]
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert len(fused_modules(other)) == len(fused_modules(fused))
        assert torch.equal(answer(other, given)[0], expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_implementations_of_a_fused_model_are_stocks(implementation):
    model, fused = both("t5")
    given = inputs("t5", "right")
    for one in (model, fused):
        one.set_attn_implementation(implementation)
    assert torch.equal(answer(fused, given)[0], answer(model, given)[0])
    fused.set_attn_implementation("tisa-fused")
    assert_close(answer(fused, given)[0], answer(model, given)[0])


def test_part_of_a_model_and_models_around_it():
    model = stock("t5")
    given = inputs("t5")
    expected = answer(model, given)[0]
    tisa.hf.fuse(model.encoder)
    assert len(fused_modules(model)) == len(fused_modules(model.encoder)) > 0
    assert_close(answer(model, given)[0], expected)
    around = torch.nn.Sequential(stock("t5 encoder"))
    assert tisa.hf.fuse(around) is around
    assert fused_modules(around)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_train_alike():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, fused = both("t5")
    given = inputs("t5", "right")
    made = []
    for one in (model, fused):
        torch.manual_seed(5)
        lora = peft.LoraConfig(target_modules=["q", "v"], r=4, init_lora_weights=False)
        made.append(peft.get_peft_model(one, lora).train())
    theirs, ours = (gradients(one, given) for one in made)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, name)
    # And the other way round: a model that has an adapter already.
    late = tisa.hf.fuse(tisa.hf.unfuse(made[1]))
    for name, gradient in gradients(late, given).items():
        assert_close(gradient, theirs[name], name)


def test_hooks_of_accelerate_stay(tmp_path):
    model = stock("t5")
    given = inputs("t5")
    expected = answer(model, given)[0]
    model.save_pretrained(tmp_path)
    placed = type(model).from_pretrained(tmp_path, device_map={"": "cpu"})
    placed.double().eval()
    fused = tisa.hf.fuse(placed)
    assert_close(answer(fused, given)[0], expected)
    assert_close(answer(tisa.hf.unfuse(fused), given)[0], expected)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["t5", "t5 tokens"])
def test_trained_saved_and_loaded_as_stock_the_loss_goes_on(kind, tmp_path):
    def losses(model, steps):
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.train()
        found = []
        for step in range(steps):
            given = inputs(kind, "right" if step % 2 else "none", batch=2, length=19)
            if kind in ENCODERS:
                given["labels"] = given["input_ids"] % 3
            loss = model(**given).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return torch.tensor(found)

    model, fused = both(kind)
    theirs, ours = losses(model, 100), losses(fused, 100)
    assert ours[-1] < 0.7 * ours[0]
    # Two runs of one model part by rounding, too: each step is fed by the one before.
    torch.testing.assert_close(ours[:30], theirs[:30], rtol=1e-5, atol=0)
    fused.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).double()
    torch.testing.assert_close(losses(loaded, 3), losses(fused, 3), rtol=1e-6, atol=0)


def test_refusals_come_before_anything_changes():
    deberta = transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16,
        )
    )  # fmt: skip
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16,
        )
    )  # fmt: skip
    long = transformers.LongT5EncoderModel(
        transformers.LongT5Config(
            vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, local_radius=4
        )
    )
    swin = transformers.SwinModel(
        transformers.SwinConfig(
            image_size=8, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=2
        )
    )
    for model, reason in (
        (deberta, "depend on what the tokens are"),
        (bert, "none of its attention adds scores of the offset"),
        (long, "attends in blocks"),
        (swin, "two offsets"),
    ):
        classes = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=reason):
            tisa.hf.fuse(model)
        assert [type(m) for m in model.modules()] == classes
    with pytest.raises(TypeError, match="expected a transformers model"):
        tisa.hf.fuse("google-t5/t5-base")


def test_the_name_alone_is_refused():
    model = stock("t5")
    tisa.hf.fuse(stock("umt5"))
    model.set_attn_implementation("tisa-fused")
    with pytest.raises(ValueError, match=r"call tisa\.hf\.fuse"):
        answer(model, inputs("t5"))
