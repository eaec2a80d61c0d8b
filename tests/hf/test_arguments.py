"""What a layer hands to its attention function is done or refused by name; nothing is dropped."""

import pytest
import torch
import transformers

import tisa.hf
from tiny import SIZES, decoder, inputs, logits, original, shake

NEAR = {"rtol": 2e-4, "atol": 2e-5}
FEW_HEADS = dict(num_key_value_heads=2, head_dim=8)
KINDS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=60, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    ),
    "mpnet": lambda: transformers.MPNetForMaskedLM(transformers.MPNetConfig(**SIZES)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **decoder(), **FEW_HEADS, num_local_experts=2, num_experts_per_tok=2, sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**decoder(), **FEW_HEADS, attn_logit_softcapping=0.5)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**decoder(), num_key_value_heads=2)
    ),
}  # fmt: skip


def stock(name):
    model = original(name, kinds=KINDS)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "sinks" in key:
                parameter.normal_(std=2.0)
    return model


def given(name):
    return inputs() | ({"decoder_input_ids": inputs()["input_ids"][:, :7]} if name == "t5" else {})


def converted(name):
    return tisa.hf.convert(stock(name), positions="keep", init="zero")


@pytest.mark.parametrize("name", ["t5", "gpt_oss"])
def test_a_stock_model_on_the_operator_computes_the_same(name):
    """T5's bias, dropped, was 71 % of its logits; the sinks 69 %."""
    model, found = stock(name), []
    if name == "t5":  # In float32 its bias's gradient, a difference of large sums, is not exact.
        model = model.double()
    for implementation in ("eager", "tisa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(**given(name)).logits
        (out**2).sum().backward()
        gradients = [p.grad for k, p in model.named_parameters() if "relative" in k or "sinks" in k]
        assert gradients
        found.append((out.detach(), *gradients))
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0.1
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * float(one.abs().max()))


def test_a_stock_model_begins_a_static_cache_on_the_operator():
    model, ids = stock("llama"), inputs(2, 6, padded=False)["input_ids"]
    whole = logits(model, input_ids=ids)
    model.set_attn_implementation("tisa")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    parts = [logits(model, input_ids=x, past_key_values=cache) for x in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **NEAR)


@pytest.mark.parametrize("name", ["bloom", "mpnet"])
def test_a_stock_model_that_would_ignore_the_name_refuses_it(name):
    model = stock(name)
    # transformers only warns here, and leaves it as it was.
    model.set_attn_implementation("tisa")
    assert model.config._attn_implementation == "eager"
    model.config._attn_implementation = "tisa"
    with pytest.raises(ValueError, match=r'"tisa" would be ignored by .*Model, whose attention'):
        logits(model, **inputs())


def test_soft_capping_is_refused_by_name_and_exact_in_eager():
    model = stock("gemma2")
    ours = tisa.hf.convert(model, positions="keep", init="zero")
    assert ours.config._attn_implementation == "eager"
    assert torch.equal(logits(ours, **inputs()), logits(model, **inputs()))
    for refusing, implementation in ((model, "tisa"), (ours, "tisa")):
        refusing.set_attn_implementation(implementation)
        with pytest.raises(ValueError, match=r'"softcap".*take attn_implementation="eager"'):
            logits(refusing, **inputs())


def test_sinks_stay_what_they_were():
    model, ours, real = stock("gpt_oss"), converted("gpt_oss"), inputs()["attention_mask"].bool()
    torch.testing.assert_close(logits(ours, **inputs())[real], logits(model, **inputs())[real])
    shake(ours)
    on_operator = logits(ours, **inputs())[real]
    ours.set_attn_implementation("eager")
    torch.testing.assert_close(on_operator, logits(ours, **inputs())[real], **NEAR)
    assert (on_operator - logits(model, **inputs())[real]).abs().max() > 1e-2
    # Packed sequences have another layout.
    ids, places = (
        inputs(1, 9, padded=False)["input_ids"],
        torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
    )
    packed = [logits(ours, input_ids=ids, position_ids=places)]
    ours.set_attn_implementation("tisa")
    packed.append(logits(ours, input_ids=ids, position_ids=places))
    torch.testing.assert_close(*packed, **NEAR)
    # Where transformers lets nobody take it, ours is not reached; it would refuse as well.
    ours.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r'hands "s_aux".*"sdpa" does not know'):
        logits(ours, **inputs())


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "tisa"])
def test_an_unknown_argument_is_refused_by_its_name(implementation):
    model = converted("llama")
    model.set_attn_implementation(implementation)
    for value in (torch.ones(4), 0.5, True):
        with pytest.raises(ValueError, match='LlamaAttention hands "block_indices" to its'):
            logits(model, **inputs(), block_indices=value)
    for value in (None, False, 0):
        logits(model, **inputs(), block_indices=value)


def test_flex_attention_refuses_an_unknown_argument():
    layer = converted("llama").model.layers[0].self_attn
    heads = [torch.zeros(1, 4, 3, 8) for _ in range(3)]
    for argument in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f'hands "{argument}".*"flex_attention" does not know'):
            tisa.hf.implementations.flex(layer, *heads, None, **{argument: torch.ones(4)})


def test_mpnet_refuses_what_it_does_not_know():
    layer = converted("mpnet").mpnet.encoder.layer[0].attention.attn
    with pytest.raises(ValueError, match='"s_aux"'):
        layer(torch.zeros(1, 3, 32), s_aux=torch.ones(4))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "tisa"])
def test_ends_of_packed_sequences_are_heard(implementation):
    model, stocked = shake(converted("llama")), stock("llama")
    ids = inputs(1, 9, padded=False)["input_ids"]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    told = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=5, max_length_k=5)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for used in (model, stocked):
        used.set_attn_implementation(implementation)
    expected = logits(model, input_ids=ids, position_ids=places)
    for extra in ({}, {"position_ids": places}):
        found = logits(model, input_ids=ids, **told, **extra)
        torch.testing.assert_close(found, expected, **NEAR)
    # transformers itself would see one sequence here, for there is a cache.
    if implementation == "tisa":
        found = logits(stocked, input_ids=ids, position_ids=places, **told)
        apart = [logits(stocked, input_ids=part) for part in (ids[:, :4], ids[:, 4:])]
        torch.testing.assert_close(found, torch.cat(apart, 1), **NEAR)
