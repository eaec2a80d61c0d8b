"""Converted models on a CUDA device; needs torch, transformers and pytest alone.

PYTHONPATH=.:tests/hf python3 -m pytest --noconftest tests/hf/test_gpu_converted.py
"""

import pytest
import torch
import transformers

import tiny
import tisa.hf

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bands_follow_a_fused_optimiser(checkpointing):
    """Kernels that a step moves far away are seen by the next pass, at lengths that use a band."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **tiny.SIZES | dict(max_position_embeddings=600, hidden_size=64, num_attention_heads=2),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = tisa.hf.convert(
        transformers.BertForMaskedLM(config), positions="keep", init="reference", num_kernels=2
    )
    model.to("cuda").train()
    if checkpointing:
        tiny.checkpoint_activations(model)
    ids = torch.randint(4, 60, (2, 512), device="cuda")
    offsets = [p for name, p in model.named_parameters() if "kernel_offsets" in name]
    amplitudes = [p for name, p in model.named_parameters() if "kernel_amplitudes" in name]
    with torch.no_grad():
        for p in amplitudes:
            p.fill_(3.0)
    # Each step moves every kernel by 100 tokens.
    optimizer = torch.optim.AdamW(offsets, lr=100.0, weight_decay=0.0, fused=True)
    for _ in range(3):
        found = {}
        for implementation in ("tisa", "eager"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            logits = model(ids).logits
            logits.square().mean().backward()
            found[implementation] = [logits.detach(), *(p.grad.clone() for p in amplitudes)]
        for one, other in zip(*found.values(), strict=True):
            assert (one - other).norm() <= 1e-3 * other.norm()
        optimizer.step()


def test_floater_with_a_stride_under_autocast():
    torch.manual_seed(0)
    config = tisa.TransformerConfig(
        vocab_size=20, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        position="floater", position_options={"stride": 8},
    )  # fmt: skip
    model = tisa.LanguageModel(config).cuda()
    tokens = torch.randint(0, 20, (2, 40), device="cuda")
    expected = model(tokens)
    for one in (model, torch.compile(model)):
        with torch.autocast("cuda", torch.bfloat16):
            found = one(tokens)
        found.float().square().mean().backward()
        assert (found - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_with_sinks(padded):
    """Of all tokens that are there, outputs and gradients of eager attention, in less memory."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **tiny.SIZES | dict(max_position_embeddings=64, hidden_size=64, num_attention_heads=2),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = tisa.hf.convert(
        transformers.BertForMaskedLM(config), init="reference", num_kernels=2, fold=False,
        window=30, sinks="ends",
    ).to("cuda")  # fmt: skip
    ids = torch.randint(4, 60, (2, 700), device="cuda")
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 400:] = 0
    real, found, peaks = mask.bool(), {}, {}
    for implementation in ("tisa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        logits = model(ids, attention_mask=mask).logits[real]
        logits.square().mean().backward()
        peaks[implementation] = torch.cuda.max_memory_allocated()
        gradients = [p.grad for name, p in model.named_parameters() if "offset_scores" in name]
        found[implementation] = [logits.detach(), *(g.clone() for g in gradients)]
    for one, other in zip(*found.values(), strict=True):
        assert (one - other).norm() <= 2e-3 * other.norm()
    assert peaks["tisa"] < peaks["eager"]
