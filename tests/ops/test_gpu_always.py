"""Keys that a window does not hide, on a CUDA device: the error budget, repeats, a captured call.

PYTHONPATH=.:tests:tests/ops python3 -m pytest --noconftest tests/ops/test_gpu_always.py
"""

import pytest
import torch

import tisa
from budget import assert_within_budget
from tisa.offsets import to_matrix

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
CASES = {
    "a window of 128": dict(length=1000, window=(128, 128)),
    "narrower than a tile": dict(length=333, window=(3, 20)),
    "128 wide": dict(length=300, window=(40, 40), dim=128),
    "24 wide, grouped heads": dict(length=300, window=(40, 40), dim=24, key_heads=2),
    "causal": dict(length=500, window=(64, None), causal=True),
    "short": dict(length=100, window=(9, 9)),
    "padded": dict(length=700, window=(50, 50), padded=True),
    "one": dict(length=1, window=(0, 0)),
}


def drawn(length, dim=64, key_heads=4, padded=False, causal=False, window=None):
    generator = torch.Generator("cuda").manual_seed(0)
    make = dict(generator=generator, device="cuda")
    qkv = [torch.randn(2, h, length, dim, **make) for h in (4, key_heads, key_heads)]
    vector = torch.randn(4, 2 * length - 1, **make) * 2
    ends = torch.full((2,), length, device="cuda")
    if padded:
        ends[1] = length // 3
    places = torch.stack((torch.zeros_like(ends), ends - 1), 1)
    mask = (torch.arange(length, device="cuda") < ends[:, None])[:, None, None, :]
    upstream = torch.randn(2, 4, length, dim, **make)
    return qkv, vector, places, mask if padded else None, upstream


def pairs(length, window, causal, places, mask):
    """Return which query sees which key."""
    at = torch.arange(length, device="cuda")
    offset = at - at[:, None]
    left, right = window
    seen = offset >= -left
    seen = seen if right is None else seen & (offset <= right)
    seen = seen | (places[:, :, None] == at).any(1)[:, None, None, :]
    seen = seen & (offset <= 0) if causal else seen
    return seen if mask is None else seen & mask


def dense(qkv, vector, seen):
    """Return attention as people write it, in the dtype of its input throughout."""
    query, key, value = qkv
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.mT * query.shape[-1] ** -0.5
    logits = logits + to_matrix(vector.to(query.dtype), query.shape[2], query.shape[2])
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def with_gradients(call, inputs, upstream):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(inputs[:3], inputs[3])
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_errors_stay_within_the_budget(name, dtype):
    case = CASES[name]
    qkv, vector, places, mask, upstream = drawn(**case)
    window, causal = case["window"], case.get("causal", False)
    qkv, upstream = [x.to(dtype) for x in qkv], upstream.to(dtype)
    seen = pairs(case["length"], window, causal, places, mask)

    def ours(qkv, vector):
        return tisa.attention(
            *qkv, vector, window=window, always=places, is_causal=causal, attn_mask=mask,
            enable_gqa=True, backend="triton",
        )  # fmt: skip

    def plain(qkv, vector):
        return dense(qkv, vector, seen)

    exact = with_gradients(plain, [x.double() for x in (*qkv, vector)], upstream)
    eager = with_gradients(plain, [*qkv, vector], upstream)
    found = with_gradients(ours, [*qkv, vector], upstream)
    named = zip(("output", "query", "key", "value", "scores"), found, exact, eager, strict=True)
    for what, one, true, other in named:
        # Sums over 1,000 queries of numbers of the order of 1 cancel in the gradients of keys.
        assert_within_budget(one, true, other, name=what, terms=64)


def test_packed_sequences():
    lengths = [300, 1, 0, 77]
    ends = torch.tensor([0, 300, 301, 301, 378], dtype=torch.int32, device="cuda")
    places = torch.tensor([[0, 299], [0, 0], [-1, -1], [0, 76]], device="cuda")
    qkv = [torch.randn(380, 4, 64, device="cuda").bfloat16() for _ in range(3)]
    vector = torch.randn(4, 599, device="cuda")
    found = {}
    for name in ("triton", "reference"):
        inputs = [x.detach().requires_grad_() for x in (*qkv, vector)]
        if name == "reference":
            inputs = [x.detach().double().requires_grad_() for x in inputs]
        out = tisa.attention(
            *inputs, cu_seqlens=ends, max_seqlen=max(lengths), window=20, always=places,
            backend=name,
        )  # fmt: skip
        found[name] = [out, *torch.autograd.grad(out.square().sum(), inputs)]
    for one, other in zip(*found.values(), strict=True):
        assert (one.double() - other.double()).norm() <= 1e-2 * other.double().norm()


def test_results_are_bit_identical_over_runs():
    case = CASES["a window of 128"]
    qkv, vector, places, _, upstream = drawn(**case)
    runs = [
        with_gradients(
            lambda qkv, v: tisa.attention(*qkv, v, window=case["window"], always=places),
            [*(x.bfloat16() for x in qkv), vector], upstream,
        )
        for _ in range(3)
    ]  # fmt: skip
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_captured_call_follows_its_places():
    qkv, vector, places, *_ = drawn(length=400)
    query, key, value = (x.bfloat16() for x in qkv)

    def call():
        return tisa.attention(query, key, value, vector, window=30, always=places)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for shown in ([[0, 399], [0, 399]], [[5, 9], [-1, 200]]):
        places.copy_(torch.tensor(shown))
        graph.replay()
        assert torch.equal(found, call())


@pytest.mark.parametrize("inference", [False, True])
def test_a_compiled_call_is_the_same(inference):
    qkv, vector, places, *_ = drawn(length=400)
    qkv = [x.bfloat16().requires_grad_(not inference) for x in qkv]

    def call():
        return tisa.attention(*qkv, vector, window=30, always=places)

    expected, found = call(), torch.compile(call)()
    assert (found - expected).norm() <= 1e-2 * expected.norm()
