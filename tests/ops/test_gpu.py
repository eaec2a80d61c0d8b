"""The operator on a CUDA device; needs torch and pytest alone, so that it runs on bare machines.

PYTHONPATH=. python3 -m pytest --noconftest tests/ops/test_gpu.py
"""

import pytest
import torch

import tisa
from cases import CASES, KEYED, Case, leaves

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch says about itself differs with every version of it.
    pytest.mark.filterwarnings("ignore"),
]

BACKENDS = ["reference", "chunked", "sdpa", "triton", "flex"]
# Relative, in the Euclidean norm.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def results(case, backend, device, dtype):
    """Return the output and every gradient on the CPU, in float64."""
    (query, key, value), scoring, options = case.make(dtype=torch.float64)
    # Rounded once, so that float64 and the dtype under test see the same input.
    qkv = [
        x.detach().to(case.rounding).to(device, dtype).requires_grad_() for x in (query, key, value)
    ]
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if "key_scores" in options:
        exact = torch.promote_types(dtype, torch.float32)
        options["key_scores"] = options["key_scores"].detach().float().to(exact).requires_grad_()
    if scoring is not None:
        scoring = case.make_scoring().to(device)
        if dtype == torch.float64:
            scoring.double()
    out = case.call(backend, qkv, scoring, options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    wanted = leaves(qkv, scoring, options)
    gradients = torch.autograd.grad(out, wanted, upstream.to(device, out.dtype))
    return [x.detach().double().cpu() for x in (out, *gradients)]


def wide(case):
    """FlexAttention needs heads at least 16 wide on a GPU."""
    return Case(**vars(case) | {"dim": 16, "value_dim": 16})


@pytest.mark.parametrize("case", [*CASES, *KEYED], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *[(backend, torch.float32) for backend in BACKENDS[:4]],
        *[(backend, torch.bfloat16) for backend in BACKENDS],
        ("triton", torch.float16),
    ],
    ids=str,
)
def test_values_and_gradients(backend, dtype, case):
    torch.compiler.reset()
    case = wide(case)
    case.rounding = dtype
    expected = results(case, "reference", "cpu", torch.float64)
    found = results(case, backend, "cuda", dtype)
    tolerance = TOLERANCE[dtype]
    if dtype == torch.bfloat16 and backend == "sdpa":
        tolerance *= 2  # the bias itself is rounded to bfloat16
    # Some gradients are 0 or small because large numbers cancel: the error is that of those.
    scale = max(x.norm() for x in expected)
    for got, want in zip(found, expected, strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).norm() <= tolerance * max(want.norm(), 0.1 * scale)


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton", "flex"])
def test_log_sum_exp_and_its_gradient(backend):
    torch.compiler.reset()
    results = []
    for device, dtype, name in (("cpu", torch.float64, "reference"), ("cuda", None, backend)):
        case = Case("", 40, 50, dim=16, value_dim=16, options={"is_causal": True})
        case.rounding = torch.float32
        qkv, _, options = case.make(torch.float64)
        qkv = [x.detach().float().to(device, dtype or torch.float32).requires_grad_() for x in qkv]
        scoring = case.make_scoring().to(device)
        out, lse = case.call(name, qkv, scoring, options | {"return_lse": True})
        wanted = [*qkv[:2], *scoring.parameters()]
        gradients = torch.autograd.grad(out.sum() + lse.square().sum(), wanted)
        results.append([x.detach().double().cpu() for x in (out, lse, *gradients)])
    for got, want in zip(results[1], results[0], strict=True):
        # FlexAttention multiplies float32 in tf32.
        assert (got - want).norm() <= (5e-3 if backend == "flex" else 1e-5) * want.norm()


def small(device="cuda", dtype=torch.bfloat16, length=200):
    torch.manual_seed(0)
    qkv = [torch.randn(2, 4, length, 32, device=device, dtype=dtype) for _ in range(3)]
    return qkv, tisa.TISA(4).to(device)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "triton"])
def test_nothing_waits_for_the_device(backend):
    qkv, scoring = small()
    qkv = [x.requires_grad_() for x in qkv]
    start = torch.tensor(0, device="cuda")
    of_keys = {"key_scores": torch.randn(2, 4, 200, device="cuda").requires_grad_()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in (
            {}, {"is_causal": True}, {"query_start": start, "is_causal": True}, of_keys,
            {"is_causal": True, **of_keys},
        ):  # fmt: skip
            vector = scoring(200, query_start=options.get("query_start"))
            out = tisa.attention(
                *qkv, vector, band=scoring.support(1e-3), backend=backend, **options
            )
            out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scoring", [tisa.TISA, tisa.T5Buckets])
@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "triton"])
def test_a_captured_graph_follows_the_parameters_and_their_band(backend, scoring):
    qkv, _ = small(dtype=torch.float32)
    scoring = scoring(4).cuda()

    def run():
        return tisa.attention(*qkv, scoring(200), band=scoring.support(1e-3), backend=backend)

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for p in scoring.parameters():
            p.add_(torch.randn_like(p) * 3)
        graph.replay()
        torch.testing.assert_close(out, run())
        torch.testing.assert_close(out, tisa.attention(*qkv, scoring(200), backend="reference"),
                                   rtol=1e-3, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "triton"])
def test_compiled_by_inductor(backend):
    torch.compiler.reset()
    scoring = tisa.TISA(4).cuda()

    def run(query, key, value):
        return tisa.attention(query, key, value, scoring(query.shape[2]), backend=backend)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for length in (100, 150):
        qkv, _ = small(dtype=torch.float32, length=length)
        torch.testing.assert_close(compiled(*qkv), run(*qkv), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_compiled_dropout_drops_what_eager_dropout_drops(backend):
    torch.compiler.reset()
    qkv, scoring = small(dtype=torch.float32)
    run = lambda: tisa.attention(*qkv, scoring(200), dropout_p=0.5, backend=backend)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True)
    torch.manual_seed(4)
    expected = run()
    torch.manual_seed(4)
    torch.testing.assert_close(compiled(), expected)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("length", [100, 1000])
@pytest.mark.parametrize("keyed", [False, True], ids=["", "key scores"])
def test_bit_identical_over_runs(backend, length, keyed):
    qkv, scoring = small(length=length)
    leaves = [x.requires_grad_() for x in qkv]
    if keyed:
        leaves.append(torch.rand(2, 4, length, device="cuda").cumsum(-1).requires_grad_())

    def run():
        out = tisa.attention(
            *qkv, scoring(length), band=scoring.band(torch.bfloat16), backend=backend,
            key_scores=leaves[3] if keyed else None,
        )  # fmt: skip
        return [out, *torch.autograd.grad(out.sum(), [*leaves, *scoring.parameters()])]

    first = run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "triton", "auto"])
def test_autocast(backend, dtype):
    qkv, scoring = small(dtype=torch.float32)
    qkv = [x.requires_grad_() for x in qkv]
    with torch.autocast("cuda", dtype=dtype):
        out = tisa.attention(*qkv, scoring(200), backend=backend)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in scoring.parameters())


def test_packed_batches_are_checked_on_the_device():
    qkv = [torch.randn(20, 4, 32, device="cuda") for _ in range(3)]
    ends = torch.tensor([0, 5, 12, 20], dtype=torch.int32, device="cuda")
    scoring = tisa.TISA(4).cuda()
    found = {
        backend: tisa.attention(*qkv, scoring(8), cu_seqlens=ends, max_seqlen=8, backend=backend)
        for backend in BACKENDS
    }
    for backend in BACKENDS[1:]:
        torch.testing.assert_close(found[backend], found["reference"], rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("scored", [True, False], ids=["", "no offset scores"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_with_scores_of_keys(backend, scored):
    torch.compiler.reset()
    lengths, results = (40, 0, 73, 1), []
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    drawn = [torch.randn(120, heads, 32) for heads in (4, 2, 2)]
    drawn += [torch.randn(120, 4).sigmoid().log().neg().cumsum(0), torch.randn(4, 149)]
    for device, dtype, name in (("cpu", torch.float64, "reference"), ("cuda", None, backend)):
        leaves = [x.detach().to(device, dtype or torch.float32).requires_grad_() for x in drawn]
        out = tisa.attention(
            *leaves[:3], leaves[4] if scored else None, key_scores=leaves[3], is_causal=True,
            cu_seqlens=ends.to(device), max_seqlen=75, enable_gqa=True, backend=name,
        )  # fmt: skip
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
        wanted = leaves if scored else leaves[:4]
        found = [out, *torch.autograd.grad(out, wanted, upstream)]
        results.append([x.detach().double().cpu() for x in found])
    for got, want in zip(results[1], results[0], strict=True):
        # FlexAttention multiplies float32 in tf32.
        assert (got - want).norm() <= (5e-3 if backend == "flex" else 2e-5) * want.norm()


def test_wrong_ends_stop_the_device():
    # A failed device-side check ends the process's use of the device: so, in another process.
    import subprocess
    import sys

    program = (
        "import torch, tisa\n"
        "qkv = [torch.randn(20, 4, 32, device='cuda') for _ in range(3)]\n"
        "ends = torch.tensor([0, 5, 20], dtype=torch.int32, device='cuda')\n"
        "tisa.attention(*qkv, cu_seqlens=ends, max_seqlen=8, backend='reference')\n"
        "torch.cuda.synchronize()\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode != 0
    assert "assert" in answer.stderr
