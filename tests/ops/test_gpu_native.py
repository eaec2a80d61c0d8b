"""Known calls in C++ on a CUDA device: bit for bit what Python launches.

PYTHONPATH=. python3 -m pytest --noconftest tests/ops/test_gpu_native.py
"""

import pytest
import torch

import tisa
from tisa.ops import repeats

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch says about itself differs with every version of it.
    pytest.mark.filterwarnings("ignore"),
]

CALLS = {
    "plain": {"band": False},
    "band": {},
    "short": {"length": 100},
    "very short": {"length": 40, "batch": 3},
    "ragged": {"length": 333},
    "causal": {"options": {"is_causal": True}},
    "window": {"options": {"window": 70}, "band": False},
    "grouped": {"key_heads": 2, "options": {"enable_gqa": True}},
    "mask": {"mask": True, "band": False},
    "no scores": {"scores": False, "band": False},
    "128 wide": {"dim": 128},
    "decoding": {"queries": 1, "length": 2000, "band": False},
    "dropout": {"options": {"dropout_p": 0.2}},
    "dropout, short": {"length": 100, "mask": True, "options": {"dropout_p": 0.2}},
}


@pytest.fixture
def native():
    """The module, on; off afterwards."""
    from tisa.ops.triton import native

    assert native.switch(True), native.state
    yield native
    native.switch(False)


def leaf(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def made(call, seed):
    """Return query, key, value, scores and options in memory that was not there before."""
    torch.manual_seed(seed)
    length, batch, dim = call.get("length", 512), call.get("batch", 2), call.get("dim", 64)
    queries, heads = call.get("queries", length), call.get("key_heads", 4)
    query = leaf(batch, queries, 4, dim).transpose(1, 2)
    key, value = (leaf(batch, length, heads, dim).transpose(1, 2) for _ in range(2))
    scores = None
    if call.get("scores", True):
        scores = leaf(4, queries + length - 1, dtype=torch.float32)
    options = dict(call.get("options", {}))
    if call.get("band", True):
        options["band"] = torch.tensor([[-20, 5], [3, 70], [-64, 0], [0, 0]], device="cuda").int()
    if call.get("mask"):
        options["attn_mask"] = torch.rand(batch, 1, 1, length, device="cuda") > 0.3
    return [query, key, value, scores], options


def results(call, seed, needs):
    """Return the output and the gradients that are wanted."""
    tensors, options = made(call, seed)
    leaves = [t if t is None else t.requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    out = tisa.attention(*leaves, **options, backend="triton")
    if not wanted:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.randn_like(out))]


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_in_python(native, name):
    several = [(True,) * 4, (False,) * 4, (True, False, False, True)]
    for needs in several[1:2] if name == "decoding" else several:
        native.switch(False)
        expected = [results(CALLS[name], seed, needs) for seed in range(5)]
        native.switch(True)
        for seed in range(5):
            for ours, theirs in zip(results(CALLS[name], seed, needs), expected[seed], strict=True):
                assert torch.equal(ours, theirs)
        assert repeats.native.counts() == [4, 1, *((3, 1) if any(needs) else (0, 0))]


MODULES = {
    "TISA": lambda: tisa.TISA(4),
    "NearFar": lambda: tisa.NearFar(4, 2),
    "T5": lambda: tisa.T5Buckets(4),
    "KERPLE": lambda: tisa.KerpleLog(4),
    "TISA v2": lambda: tisa.TISAv2(4, 3),
    "ALiBi": lambda: tisa.ALiBi(4),
}


@pytest.mark.parametrize("length", [100, 1500])
@pytest.mark.parametrize("name", MODULES)
def test_a_scoring_function_gives_the_same_as_in_python(native, name, length):
    torch.manual_seed(0)
    scoring = MODULES[name]().cuda()
    leaves = [leaf(2, 4, length, 64).requires_grad_() for _ in range(3)]
    wanted, upstream = [*leaves, *scoring.parameters()], leaf(2, 4, length, 64)
    found: dict[bool, list] = {True: [], False: []}
    for on in (False, True):
        torch.manual_seed(1)
        native.switch(on)
        for _ in range(4):
            # As an optimiser leaves it: other numbers in the same parameters.
            with torch.no_grad():
                for p in scoring.parameters():
                    p.copy_(torch.randn_like(p) * 0.5)
            out = tisa.attention(*leaves, scoring, backend="triton")
            found[on] += [out.detach(), *torch.autograd.grad(out, wanted, upstream)]
    assert all(map(torch.equal, found[True], found[False]))
    assert repeats.native.counts()[0] == 3


def test_a_captured_module_follows_its_parameters(native):
    scoring = tisa.TISA(4).cuda()
    leaves = [leaf(2, 4, 500, 64).requires_grad_() for _ in range(3)]
    wanted, upstream = [*leaves, *scoring.parameters()], leaf(2, 4, 500, 64)

    def step():
        out = tisa.attention(*leaves, scoring, backend="triton")
        return [out, *torch.autograd.grad(out, wanted, upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for p in scoring.parameters():
            p.add_(torch.randn_like(p) * 0.5)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_a_captured_step_and_another_stream(native):
    tensors, options = made({}, 0)
    leaves = [t.requires_grad_() for t in tensors]
    upstream = torch.randn_like(leaves[0])

    def step():
        out = tisa.attention(*leaves, **options, backend="triton")
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            beside = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert repeats.native.counts()[1::2] == [1, 1]
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.5)
    graph.replay()
    fresh = step()
    for a, b, c in zip(captured, fresh, beside, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_nothing_waits_for_the_device(native):
    for _ in range(3):
        results({}, 0, (True,) * 4)
    tensors, options = made({}, 0)
    leaves = [t.requires_grad_() for t in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        tisa.attention(*leaves, **options, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert repeats.native.counts()[0] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast(native, dtype):
    scoring = tisa.TISA(4).cuda()
    qkv = [leaf(2, 4, 200, 32, dtype=dtype).requires_grad_() for _ in range(3)]

    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = tisa.attention(*qkv, scoring(200), backend="triton")
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)]

    native.switch(False)
    expected = run()
    native.switch(True)
    for _ in range(4):
        assert all(map(torch.equal, run(), expected))
    # What is cast on the way in is another tensor each time, and is looked at.
    assert repeats.native.counts()[0] == (3 if dtype == torch.bfloat16 else 0)


def test_memory_does_not_grow(native):
    for _ in range(5):
        results({}, 0, (True,) * 4)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        results({}, 0, (True,) * 4)
    assert torch.cuda.memory_allocated() == before


def test_many_calls_switch_it_on():
    """A loop that nobody told anything goes over to C++, and nothing else changes."""
    from tisa.ops.triton import native

    native.switch(False)
    native.state, native._repeated, native._building = "not yet", 0, None
    tensors, options = made(CALLS["band"], 0)
    wanted = tisa.attention(*tensors, **options)
    try:
        for _ in range(native.MANY + 1):
            assert repeats.native is None
            tisa.attention(*tensors, **options)
        native._building.join()
        for _ in range(3):
            found = tisa.attention(*tensors, **options)
        assert repeats.native.counts()[0] >= 1
        assert found.equal(wanted)
    finally:
        native.switch(False)
