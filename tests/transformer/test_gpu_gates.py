"""Gates and sinks in a decoder on a CUDA device: numbers, caches, packs, one graph, nothing waits.

PYTHONPATH=.:lab python3 -m pytest --noconftest tests/transformer/test_gpu_gates.py
"""

import copy

import pytest
import torch

from tisa.transformer import Cache, LanguageModel, TransformerConfig

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
VOCABULARY = 50
# Not Cable's relu: in bfloat16 a token near its kink changes sides, and so does its gradient.
KINDS = [
    ("fox", False), ("cable:variant=author", False), ("near-far-fox", False), ("fox", True),
    ("tisa", True),
]  # fmt: skip


def model_of(name, sinks):
    torch.manual_seed(0)
    model = LanguageModel(
        TransformerConfig(
            vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
            position=name, is_causal=True, sinks=sinks, initializer_range=0.1,
        )
    )  # fmt: skip
    return model.to(DEVICE)


def tokens(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, shape, generator=generator).to(DEVICE)


def loss_of(model, x):
    logits = model(x[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())


def gradients(model, x):
    model.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]


def close(found, expected, most):
    """Check a list of tensors: each off by this share of its length, or of the longest's 1e-3."""
    longest = max(float(one.double().norm()) for one in expected)
    for one, other in zip(found, expected, strict=True):
        off = (one.double().cpu() - other.double().cpu()).norm()
        assert off <= most * max(float(other.double().norm()), 1e-3 * longest)


@pytest.mark.parametrize(("name", "sinks"), KINDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_loss_and_gradients(name, sinks, dtype, most):
    model, x = model_of(name, sinks), tokens(2, 301)
    exact = gradients(copy.deepcopy(model).cpu().double(), x.cpu())
    close(gradients(model.to(dtype), x), exact, most)


@pytest.mark.parametrize(("name", "sinks"), KINDS)
def test_a_cache_and_a_pack(name, sinks):
    model, x = model_of(name, sinks).eval(), tokens(2, 150)
    with torch.no_grad():
        full, cache = model(x), Cache()
        found = [model(piece, cache=cache) for piece in x.split([100, *[1] * 50], dim=1)]
        close([torch.cat(found, 1)], [full], 1e-4)
        ends = torch.tensor([0, 40, 41, 150], dtype=torch.int32, device=DEVICE)
        packed = model(x[0], cu_seqlens=ends, max_seqlen=109)
        apart = [model(x[:1, a:b])[0] for a, b in ((0, 40), (40, 41), (41, 150))]
        close([packed], [torch.cat(apart)], 1e-4)


@pytest.mark.parametrize("name", ["fox", "near-far-fox"])
def test_compiled(name):
    model, x = model_of(name, True), tokens(2, 129)
    expected = gradients(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    logits = compiled(x[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    close([p.grad.flatten() for p in model.parameters()], expected[1:], 1e-3)


@pytest.mark.parametrize(("name", "sinks"), KINDS)
def test_nothing_waits_for_the_device(name, sinks):
    model, x = model_of(name, sinks).bfloat16(), tokens(2, 257)
    gradients(model, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
