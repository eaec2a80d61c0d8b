"""What must hold for every family: nothing lost at the start, scores at work, nothing else."""

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import tisa.hf
from tiny import (
    DECODERS,
    FAMILIES,
    ROTARY,
    implementations,
    inputs,
    logits,
    original,
    shake,
    token_lists,
)  # fmt: skip
from tisa.hf.core import OwnScores

FLOAT32 = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def replaced(name):
    return tisa.hf.convert(
        original(name), positions="replace", init="zero", calibration=token_lists()
    )


def test_keep_with_zero_changes_nothing(name):
    model, given = original(name), inputs()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    converted = tisa.hf.convert(model, positions="keep", init="zero")
    for implementation in implementations(name):
        converted.set_attn_implementation(implementation)
        model.set_attn_implementation(
            "eager" if name == "mpnet" else implementation.replace("tisa", "sdpa")
        )
        found, expected = logits(converted, **given), logits(model, **given)
        real = given["attention_mask"].bool()
        if implementation == "eager":
            assert torch.equal(found, expected)
        torch.testing.assert_close(found[real], expected[real], **FLOAT32)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(model) is type(original(name))


def test_scores_take_effect_alike_in_every_implementation(name):
    converted = tisa.hf.convert(original(name), positions="keep", init="zero")
    given = inputs()
    real = given["attention_mask"].bool()
    before = logits(converted, **given)[real]
    shake(converted)
    found = []
    for implementation in implementations(name):
        converted.set_attn_implementation(implementation)
        found.append(logits(converted, **given)[real])
    assert (found[0] - before).abs().max() > 1e-2
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **FLOAT32)
    for wrong in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(ValueError, match="ignore the position scores"):
            converted.set_attn_implementation(wrong)
        converted.config._attn_implementation = wrong
        with pytest.raises((ValueError, KeyError)):
            logits(converted, **given)


def test_output_attentions_are_those_with_scores(name):
    converted = shake(tisa.hf.convert(original(name), positions="keep", init="zero"))
    given = inputs(padded=False)
    for implementation in implementations(name):
        converted.set_attn_implementation(implementation)
        with torch.no_grad():
            weights = converted.base_model(**given, output_attentions=True).attentions
        assert len(weights) == converted.config.num_hidden_layers
        torch.testing.assert_close(weights[0].sum(-1), torch.ones_like(weights[0].sum(-1)))
        if implementation == "eager":
            expected = weights
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, **FLOAT32)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(name, side):
    models = [shake(tisa.hf.convert(original(name), positions="keep", init="zero"))]
    if name not in ROTARY:
        models.append(shake(replaced(name)))
    alone = inputs(1, 7, padded=False)["input_ids"]
    pad = torch.full((1, 4), 1)
    mask = torch.cat((torch.ones(1, 7), torch.zeros(1, 4)), 1).long()
    if side == "right":
        given = {"input_ids": torch.cat((alone, pad), 1), "attention_mask": mask}
        real = slice(0, 7)
    else:
        given = {"input_ids": torch.cat((pad, alone), 1), "attention_mask": mask.flip(1)}
        real = slice(4, None)
    for model in models:
        if side == "left" and model.config.tisa["positions"] == "keep":
            # Stock absolute positions count the padding, unless they are told not to.
            continue
        for implementation in implementations(name):
            model.set_attn_implementation(implementation)
            torch.testing.assert_close(
                logits(model, **given)[:, real], logits(model, input_ids=alone), **FLOAT32
            )


@pytest.mark.parametrize("positions", ["keep", "replace"])
def test_save_and_load(name, positions, tmp_path):
    if positions == "replace" and name in ROTARY:
        with pytest.raises(ValueError, match="rotations"):
            replaced(name)
        return
    converted = (
        replaced(name)
        if positions == "replace"
        else tisa.hf.convert(original(name), positions="keep")
    )
    converted = shake(converted.eval())
    converted.save_pretrained(tmp_path, max_shard_size="20KB")
    auto = (
        transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModelForMaskedLM
    )
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(converted)
    assert isinstance(loaded, type(original(name)))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded, **inputs()), logits(converted, **inputs()))
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    placed = auto.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert type(tisa.hf.load(str(tmp_path))) is type(converted)
    for model in (half, placed, loaded.half()):
        scores = {k: v for k, v in model.named_parameters() if "offset_scores" in k}
        assert scores
        assert all(p.dtype == torch.float32 for p in scores.values())
        assert model.get_input_embeddings().weight.dtype != torch.float32
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert any(isinstance(m, OwnScores) for m in base.modules())


def test_every_kernel_has_a_gradient_by_the_second_step(name):
    converted = tisa.hf.convert(original(name), positions="keep", init="zero").train()
    for module in converted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(tisa.hf.parameter_groups(converted, lr=0.1), lr=0.1)
    given = inputs(padded=False)
    for _ in range(2):
        optimizer.zero_grad()
        found = converted(**given).logits
        cross_entropy(found.flatten(0, 1), given["input_ids"].roll(1, 1).flatten()).backward()
        optimizer.step()
    scores = {k: p for k, p in converted.named_parameters() if "offset_scores" in k}
    assert scores
    for key, p in scores.items():
        assert (p.grad != 0).all(), key


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "tisa"])
def test_a_cache_equals_the_full_pass(decoder, implementation):
    models = [shake(tisa.hf.convert(original(decoder), positions="keep", init="zero"))]
    if decoder not in ROTARY:
        models.append(shake(replaced(decoder)))
    ids = inputs(2, 9, padded=False)["input_ids"]
    for model in models:
        model.set_attn_implementation(implementation)
        whole = logits(model, input_ids=ids)
        with torch.no_grad():
            first = model(input_ids=ids[:, :5], use_cache=True)
            second = model(input_ids=ids[:, 5:8], past_key_values=first.past_key_values)
            third = model(input_ids=ids[:, 8:], past_key_values=second.past_key_values)
        stepwise = torch.cat((first.logits, second.logits, third.logits), 1)
        torch.testing.assert_close(stepwise, whole, **FLOAT32)
        settings = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=1)
        with_cache = model.generate(ids, **settings)
        assert torch.equal(with_cache, model.generate(ids, use_cache=False, **settings))
        static = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            first = model(input_ids=ids[:, :5], past_key_values=static, use_cache=True).logits
            second = model(input_ids=ids[:, 5:6], past_key_values=static, use_cache=True).logits
        torch.testing.assert_close(torch.cat((first, second), 1), whole[:, :6], **FLOAT32)


@pytest.mark.parametrize("encoder", [n for n in FAMILIES if n not in ROTARY])
def test_packed_sequences_do_not_see_each_other(encoder):
    model = shake(replaced(encoder))
    parts = [inputs(1, n, padded=False)["input_ids"] for n in (5, 8, 3)]
    packed = torch.cat(parts, 1)
    places = torch.cat([torch.arange(p.shape[1]) for p in parts]).unsqueeze(0)
    for implementation in implementations(encoder):
        model.set_attn_implementation(implementation)
        alone = torch.cat([logits(model, input_ids=p) for p in parts], 1)
        together = logits(model, input_ids=packed, position_ids=places)
        torch.testing.assert_close(together, alone, **FLOAT32)
        assert (logits(model, input_ids=packed) - alone).abs().max() > 1e-2


@pytest.mark.parametrize("family", [n for n in FAMILIES if n not in ROTARY])
def test_replaced_positions_take_any_length(family):
    model = shake(replaced(family))
    given = inputs(1, 150, padded=False)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        logits(original(family), **given)
    assert torch.isfinite(logits(model, **given)).all()
    assert model.config.max_position_embeddings > 10**5
    # Nothing of the place is left: the same tokens further on give the same output.
    ids = given["input_ids"][:, :9]
    ends = torch.tensor([[2] * 60])
    if family not in DECODERS:
        shifted = torch.cat((ends, ids), 1)
        mask = torch.cat((torch.zeros_like(ends), torch.ones_like(ids)), 1)
        found = logits(model, input_ids=shifted, attention_mask=mask)[:, 60:]
        torch.testing.assert_close(found, logits(model, input_ids=ids), **FLOAT32)
