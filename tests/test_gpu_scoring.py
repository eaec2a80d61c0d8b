"""The kernels of scoring functions on a CUDA device: the error budget, the same bits, CUDA graphs.

PYTHONPATH=. python3 -m pytest --noconftest tests/test_gpu_scoring.py
"""

import copy

import pytest
import torch

import tisa
from tisa.scoring import bands_of, scores_of

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
HEADS, LAYERS = 12, 3
EVERY = {
    "tisa": lambda: tisa.TISA(HEADS),
    "tisa-v2": lambda: tisa.TISAv2(HEADS, num_agnostic_heads=2),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "t5-causal": lambda: tisa.T5Buckets(HEADS, bidirectional=False),
    "alibi": lambda: tisa.ALiBi(HEADS),
    "kerple-log": lambda: tisa.KerpleLog(HEADS),
    "kerple-power": lambda: tisa.KerplePower(HEADS),
    "near-far": lambda: tisa.NearFar(HEADS),
}


def results(vectors, functions):
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) * v).sum()
        for v in vectors
    )
    wanted = [p for f in functions for p in f.parameters()]
    return [*vectors, *(torch.autograd.grad(loss, wanted) if wanted else ())]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [1, 33, 512, 3000])
def test_scores_and_gradients(name, length):
    functions = [EVERY[name]().cuda() for _ in range(LAYERS)]
    exact = [copy.deepcopy(f).cpu().double() for f in functions]
    wanted = results([f(length) for f in exact], exact)
    found = results(scores_of(functions, length), functions)
    plain = results([f(length) for f in functions], functions)
    for got, want, eager in zip(found, wanted, plain, strict=True):
        allowed = 2 * (eager.double().cpu() - want).abs().max()
        allowed += 16 * torch.finfo(torch.float32).eps * want.abs().max().clamp_min(1.0)
        assert (got.double().cpu() - want).abs().max() <= allowed
    for _ in range(10):
        again = results(scores_of(functions, length), functions)
        assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bands(dtype):
    functions = [tisa.TISA(HEADS).cuda() for _ in range(LAYERS)]
    for found, function in zip(bands_of(functions, dtype), functions, strict=True):
        assert (found - function.band(dtype)).abs().max() <= 1


@pytest.mark.parametrize("name", EVERY)
def test_in_a_cuda_graph(name):
    functions = [EVERY[name]().cuda() for _ in range(LAYERS)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        results(scores_of(functions, 300), functions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    upstream = torch.randn(HEADS, 599, device="cuda")
    with torch.cuda.graph(graph):
        captured = [v * upstream for v in scores_of(functions, 300)]
    with torch.no_grad():
        for f in functions:
            for p in f.parameters():
                p.mul_(0.5)
    graph.replay()
    for one, function in zip(captured, functions, strict=True):
        torch.testing.assert_close(one, function(300) * upstream, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [300, 1000])
def test_the_whole_call(name, length):
    """`tisa.attention` with the function itself: as with its vector, and its band or none."""
    scoring = EVERY[name]().cuda()
    qkv = [torch.randn(2, HEADS, length, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    found = tisa.attention(*qkv, scoring)
    expected = tisa.attention(*(x.double() for x in qkv), scoring(length), backend="reference")
    assert (found.double() - expected).abs().max() <= 2e-2
