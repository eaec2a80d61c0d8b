"""Which backend "auto" takes: the documented rule, line by line."""

import pytest
import torch

import tisa
from tisa.ops import api
from tisa.ops.api import choose_backend


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


RULE = {
    "no scores": ("sdpa", {}, False),
    "no scores, causal": ("sdpa", {"is_causal": True}, False),
    "no scores, log-sum-exp": ("chunked", {"return_lse": True}, False),
    "no scores, window": ("chunked", {"window": 3}, False),
    "scores": ("chunked", {}, True),
    "scores, causal": ("chunked", {"is_causal": True}, True),
    "no scores, causal, negative scale": ("chunked", {"is_causal": True, "scale": -0.3}, False),
    "no scores, causal, scale 0": ("chunked", {"is_causal": True, "scale": 0}, False),
    "no scores, negative scale": ("sdpa", {"scale": -0.3}, False),
    "scores of keys": ("chunked", {"key_scores": torch.zeros(1, 2, 5)}, False),
    "scores of keys and offsets": ("chunked", {"key_scores": torch.zeros(1, 2, 5)}, True),
    "scores of keys, causal, log-sum-exp": (
        "chunked",
        {"key_scores": torch.zeros(1, 2, 5), "is_causal": True, "return_lse": True},
        False,
    ),
    "a mask's gradient": ("chunked", {"attn_mask": torch.zeros(5, 5).requires_grad_()}, True),
}


@pytest.mark.parametrize("name", RULE)
def test_what_auto_takes(name, monkeypatch):
    expected, options, scores = RULE[name]
    calls = []
    monkeypatch.setattr(api, "choose_backend", lambda call: calls.append(call) or "reference")
    tisa.attention(*[torch.randn(1, 2, 5, 4)] * 3, torch.randn(2, 9) if scores else None, **options)
    assert choose_backend(calls[0]) == expected


@pytest.mark.parametrize(
    ("length", "dtype", "expected"),
    [
        (512, torch.float32, "sdpa"),
        (16_384, torch.float32, "sdpa"),
        (16_385, torch.float32, "chunked"),
        (512, torch.bfloat16, "chunked"),
        (512, torch.float16, "chunked"),
    ],
)
def test_what_auto_takes_on_an_accelerator(length, dtype, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(api, "choose_backend", lambda call: calls.append(call) or "reference")
    qkv = [meta(1, 1, length, 4, dtype=dtype)] * 3
    tisa.attention(*qkv, meta(1, 2 * length - 1))
    assert choose_backend(calls[0]) == expected
    # Scores of keys make the dense bias each sequence's own.
    for batch, backend in ((1, expected), (2, "chunked" if length > 11_585 else expected)):
        qkv = [meta(batch, 1, length, 4, dtype=dtype)] * 3
        tisa.attention(*qkv, key_scores=meta(batch, 1, length))
        assert choose_backend(calls[-1]) == backend


def test_what_auto_takes_on_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(api, "choose_backend", lambda call: calls.append(call) or "reference")
    # A GPU that is imagined; the kernels are interpreted, and say no to float64 as on a real one.
    monkeypatch.setattr(api, "GPUS", ("meta",))
    for dtype, scores in ((torch.float16, True), (torch.float16, False), (torch.float64, True)):
        qkv = [meta(1, 1, 512, 4, dtype=dtype)] * 3
        tisa.attention(*qkv, meta(1, 1023) if scores else None)
    assert [choose_backend(call) for call in calls] == ["triton", "sdpa", "sdpa"]
    monkeypatch.setattr(api, "HAS_TRITON", False)
    assert choose_backend(calls[0]) == "chunked"
    with pytest.raises(ModuleNotFoundError, match="needs the package triton"):
        tisa.attention(*[torch.randn(1, 2, 5, 4)] * 3, backend="triton")
