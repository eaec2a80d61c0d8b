"""FIRE on both sides of its threshold, and methods and windows layer by layer, on a CUDA device.

PYTHONPATH=. python3 -m pytest --noconftest tests/positions/test_gpu_positions.py
"""

import copy

import pytest
import torch

from tisa.positions import fire
from tisa.transformer import Cache, Transformer, TransformerConfig

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
# Longer than what bands are for, and past one of the thresholds.
LENGTH = 600
CASES = [
    ("fire", None),
    ("fire:initial_length=100", None),
    ("tisa+rotary:scaling=yarn:factor=4+fire:initial_length=700", [None, 64]),
    ("tisa+fire:initial_length=100+near-far", [64, None, 200]),
    ("shaw+none", [16, None]),
]


def model_of(position, window, **values):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        position=position, window=window, **values,
    )  # fmt: skip
    return Transformer(config)


def gradients(model, ids):
    model.zero_grad()
    output = model(ids)
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters())]


def alike(found, expected):
    """Each within a small share of its own largest number, or of the largest of all."""
    scale = max(float(t.abs().max()) for t in expected[1:])
    for one, other in zip(found, expected, strict=True):
        least = max(float(other.abs().max()), 1e-3 * scale)
        assert float((one.cpu().double() - other).abs().max()) < 2e-3 * least


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("position", "window"), CASES)
def test_numbers_and_gradients(position, window, is_causal):
    model, ids = model_of(position, window, is_causal=is_causal), torch.randint(0, 50, (2, LENGTH))
    expected = gradients(copy.deepcopy(model).double(), ids)
    alike(gradients(model.to(DEVICE), ids.to(DEVICE)), expected)


@pytest.mark.parametrize(("position", "window"), CASES)
def test_compiled(position, window):
    torch._dynamo.reset()
    model, ids = model_of(position, window), torch.randint(0, 50, (2, LENGTH))
    expected = gradients(copy.deepcopy(model).double(), ids)
    model.to(DEVICE)
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    output = compiled(ids.to(DEVICE))
    output.square().mean().backward()
    alike([output.detach(), *(p.grad for p in model.parameters())], expected)


@pytest.mark.parametrize(("position", "window"), CASES)
def test_packed_and_cached(position, window):
    model = model_of(position, window, is_causal=True).to(DEVICE).eval()
    ids = torch.randint(0, 50, (1, LENGTH), device=DEVICE)
    with torch.no_grad():
        whole, cache = model(ids), Cache()
        pieces = [model(some, cache=cache) for some in ids.split([300, 1, 299], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-3, atol=1e-3)
        ends = torch.tensor([0, LENGTH, LENGTH + 200], dtype=torch.int32, device=DEVICE)
        packed = model(torch.cat((ids[0], ids[0, :200])), cu_seqlens=ends, max_seqlen=LENGTH)
        torch.testing.assert_close(packed[:LENGTH], whole[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(packed[LENGTH:], whole[0, :200], rtol=1e-3, atol=1e-3)


def test_fire_in_a_recorded_graph():
    """While a graph is recorded nobody can look at the threshold: logits of every pair."""
    model = model_of("fire", None).to(DEVICE).eval()
    ids = torch.randint(0, 50, (1, 100), device=DEVICE)
    with torch.no_grad():
        expected = model(ids)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), pytest.MonkeyPatch.context() as patch:
            # What is allocated or tuned at first, for the form that is recorded.
            patch.setattr(fire, "plain", lambda *_: False)
            model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(ids)
        graph.replay()
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
