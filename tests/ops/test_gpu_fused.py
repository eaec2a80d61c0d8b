"""The fused kernels on a CUDA device: the error budget of every feature, and what is a GPU's own.

PYTHONPATH=. python3 -m pytest --noconftest tests/ops/test_gpu_fused.py
"""

import itertools

import pytest
import torch

import tisa
from budget import assert_within_budget
from tisa.offsets import to_matrix

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # What torch says about itself differs with every version of it.
    pytest.mark.filterwarnings("ignore"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def eager(query, key, value, vector, *, band=None, mask=None, scale=None, start=None, reach=None):
    """Return attention as people write it, in the dtype of its input throughout."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    queries, keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.transpose(-1, -2) * scale
    start = keys - queries if start is None else start
    offset = (
        torch.arange(keys, device="cuda")[None]
        - torch.arange(queries, device="cuda")[:, None] - start
    )  # fmt: skip
    if vector is not None:
        dense = to_matrix(vector.to(query.dtype), queries, keys)
        if band is not None:
            low, high = band[:, :1, None], band[:, 1:, None]
            held = offset.clamp(low, high) + (queries - 1) + start
            wide = vector.to(query.dtype)
            dense = wide.gather(1, held.flatten(1).clamp(0, wide.shape[1] - 1)).view_as(dense)
        logits = logits + dense
    left, right = reach or (None, None)
    if left is not None:
        logits = logits.masked_fill(offset < -left, -torch.inf)
    if right is not None:
        logits = logits.masked_fill(offset > right, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


FEATURES = {
    "plain": {},
    "ragged": {"queries": 333, "keys": 333},
    "one": {"queries": 1, "keys": 1},
    "short": {"queries": 100, "keys": 100},
    "very short": {"queries": 33, "keys": 33},
    "fewer queries": {"queries": 70, "keys": 410},
    "more queries": {"queries": 410, "keys": 70},
    "causal": {"options": {"is_causal": True}},
    "causal, blind rows": {"queries": 200, "keys": 90, "options": {"is_causal": True}},
    "window": {"options": {"window": (70, 30)}},
    "start": {"options": {"query_start": 100, "is_causal": True}},
    "grouped": {"key_heads": 2},
    "padding": {"mask": True},
    "band": {"band": [[-20, 5], [3, 70], [-128, -64], [0, 0]]},
    "band, causal": {"band": [[-20, 5], [3, 70], [-128, -64], [0, 0]],
                     "options": {"is_causal": True}},
    "band, ragged": {"queries": 333, "keys": 333,
                     "band": [[-20, 5], [3, 70], [-128, -64], [0, 0]]},
    "16 wide": {"dim": 16}, "32 wide": {"dim": 32}, "80 wide": {"dim": 80},
    "128 wide": {"dim": 128}, "256 wide": {"dim": 256}, "20 wide": {"dim": 20},
    "no scores": {"scores": None},
    "scale": {"options": {"scale": -0.2}},
    "scores up to 300": {"scores": 100.0},
    "scores up to 300, band": {"scores": 100.0, "band": [[-20, 5], [3, 70], [-128, -64], [0, 0]]},
}  # fmt: skip


def terms_of_scores(formula, qkv, vector, upstream):
    """Return how large the terms are that cancel in a score's gradient, the largest of all.

    Where a query sees one key alone, P·(dP − Σ P·dP) is 0 but for the rounding of dP; a band's edge
    receives the sum of all rows' (measured: 3e-5 beside scores of 300, interpreted or not).
    """
    query, key, value = (x.double() for x in qkv)
    each = torch.eye(key.shape[2], dtype=torch.float64, device="cuda").expand(*key.shape[:3], -1)
    weights = formula(query, key, each, vector.double())
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    returned = (upstream.double().square() @ value.square().transpose(-1, -2)).sqrt()
    terms = weights * (returned + (weights * returned).sum(-1, keepdim=True))
    return float(terms.square().sum((0, -2, -1)).amax().sqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_errors_stay_within_the_budget(name, dtype):
    sizes = {"queries": 384, "keys": 384, "key_heads": 4, "dim": 64, "scores": 2.0} | FEATURES[name]
    queries, keys, options = sizes["queries"], sizes["keys"], sizes.get("options", {})
    torch.manual_seed(0)

    def drawn(heads, length):
        # As a projection leaves it: (batch, length, heads, dim).
        x = torch.randn(2, length, heads, sizes["dim"], device="cuda").to(dtype)
        return x.transpose(1, 2)

    qkv = [drawn(4, queries), drawn(sizes["key_heads"], keys), drawn(sizes["key_heads"], keys)]
    upstream = drawn(4, queries)
    vector = band = mask = None
    if sizes["scores"] is not None:
        vector = torch.randn(4, queries + keys - 1, device="cuda") * sizes["scores"]
    if "band" in sizes:
        band = torch.tensor(sizes["band"], dtype=torch.int32, device="cuda")
    if "mask" in sizes:
        mask = torch.rand(2, 1, 1, keys, device="cuda") > 0.3

    def run(formula, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
        wanted = list(leaves)
        score = None
        if vector is not None:
            score = vector.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
            wanted.append(score)
        out = formula(*leaves, score)
        return [out, *torch.autograd.grad(out, wanted, upstream.to(dtype))]

    def ours(backend):
        return lambda *x: tisa.attention(
            *x, band=band, attn_mask=mask, enable_gqa=True, backend=backend, **options
        )

    right = 0 if options.get("is_causal") else None

    def as_written(*x):
        return eager(
            *x, band=band, mask=mask, scale=options.get("scale"), start=options.get("query_start"),
            reach=options.get("window", (None, right)),
        )  # fmt: skip

    plain = run(as_written, dtype)
    exact, found = run(ours("reference"), torch.float64), run(ours("triton"), dtype)
    for what, *three in zip(("output", "q", "k", "v", "scores"), found, exact, plain, strict=False):
        cancel = what == "scores" and dtype == torch.float32
        terms = terms_of_scores(as_written, qkv, vector, upstream) if cancel else 0.0
        assert_within_budget(*three, name=what, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("banded", [False, True])
def test_packed_batches(dtype, options, banded):
    ends = torch.tensor([0, 100, 100, 101, 500, 777], dtype=torch.int32, device="cuda")
    band = torch.tensor([[-9, 7]] * 4, dtype=torch.int32, device="cuda") if banded else None
    results = []
    for backend, kind in (("chunked", torch.float64), ("triton", dtype)):
        torch.manual_seed(0)
        leaves = [
            torch.randn(800, 4, 64, device="cuda").to(dtype).to(kind).requires_grad_()
            for _ in range(3)
        ]
        scores = torch.randn(4, 797, device="cuda")
        scores = scores.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        torch.manual_seed(1)
        out, lse = tisa.attention(
            *leaves, scores, cu_seqlens=ends, max_seqlen=399, band=band, return_lse=True,
            backend=backend, **options,
        )  # fmt: skip
        total = out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
        results.append([out, *torch.autograd.grad(total, [*leaves, scores])])
    for want, got in zip(*results, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2
        assert (got.double() - want).norm() <= tolerance * want.norm()
    assert (results[1][0][777:] == 0).all()


KEY_SCORES = {
    "plain": {},
    "ragged": {"length": 333},
    "short": {"length": 100},
    "very short": {"length": 33},
    "no scores": {"scores": False},
    "no scores, causal": {"scores": False, "options": {"is_causal": True}},
    "band, causal": {"band": [[-20, 5], [3, 70], [-128, -64], [0, 0]],
                     "options": {"is_causal": True}},
    "window": {"options": {"window": (70, 30)}},
    "grouped, causal": {"key_heads": 2, "options": {"is_causal": True}},
    "padding": {"mask": (2, 1, 1, -1)},
    "dense mask": {"mask": (2, 4, -1, -1)},
    "as a projection leaves them": {"turned": True},
    "32 wide": {"dim": 32}, "80 wide": {"dim": 80}, "128 wide": {"dim": 128},
    "256 wide": {"dim": 256},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KEY_SCORES)
def test_key_scores_are_a_mask_with_one_row(name, dtype):
    sizes = {"length": 384, "key_heads": 4, "dim": 64, "scores": True} | KEY_SCORES[name]
    n, options = sizes["length"], sizes.get("options", {}) | {"enable_gqa": True}
    torch.manual_seed(0)
    qkv = [
        torch.randn(2, heads, n, sizes["dim"], device="cuda").to(dtype)
        for heads in (4, sizes["key_heads"], sizes["key_heads"])
    ]
    vector = torch.randn(4, 2 * n - 1, device="cuda") if sizes["scores"] else None
    band = sizes.get("band")
    if band is not None:
        options["band"] = torch.tensor(band, dtype=torch.int32, device="cuda")
    of_keys = 2 * torch.randn(2, n, 4, device="cuda").mT
    if not sizes.get("turned"):
        of_keys = of_keys.contiguous()
    mask = None
    if "mask" in sizes:
        mask = torch.rand([n if x == -1 else x for x in sizes["mask"]], device="cuda") > 0.3
    upstream = torch.randn_like(qkv[0])

    def run(kind, backend):
        wide = torch.promote_types(kind, torch.float32)
        leaves = [x.to(kind).requires_grad_() for x in qkv]
        rest = [None if x is None else x.to(wide).requires_grad_() for x in (vector, of_keys)]
        if backend == "triton":
            more = {"attn_mask": mask, "key_scores": rest[1]}
        else:
            row = rest[1].unsqueeze(2)
            more = {"attn_mask": row if mask is None else row.masked_fill(~mask, -torch.inf)}
        out = tisa.attention(*leaves, rest[0], backend=backend, **options, **more)
        wanted = [*leaves, *(x for x in rest if x is not None)]
        return [out, *torch.autograd.grad(out, wanted, upstream.to(kind))]

    exact, found = run(torch.float64, "reference"), run(dtype, "triton")
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    scale = max(x.norm() for x in exact)
    for got, want in zip(found, exact, strict=True):
        assert (got.double() - want).norm() <= tolerance * max(want.norm(), 0.1 * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_packed_key_scores(dtype, key_heads):
    ends = [0, 100, 100, 101, 500, 777]
    torch.manual_seed(0)
    made = [torch.randn(800, heads, 64, device="cuda").to(dtype) for heads in (4, *[key_heads] * 2)]
    made += [torch.randn(800, 4, device="cuda"), torch.randn(4, 797, device="cuda")]
    results = []
    for kind in (torch.float64, dtype):
        wide = torch.promote_types(kind, torch.float32)
        *qkv, of_keys, scores = (
            x.to(kind if i < 3 else wide).requires_grad_() for i, x in enumerate(made)
        )
        if kind == torch.float64:
            # Each sequence by itself, key scores as a mask.
            parts = [
                tisa.attention(
                    *(x[a:b].transpose(0, 1)[None] for x in qkv),
                    scores[:, 399 - (b - a) : 399 + (b - a) - 1],
                    attn_mask=of_keys[a:b].T[None, :, None], is_causal=True, enable_gqa=True,
                    backend="reference",
                )[0].transpose(0, 1)
                for a, b in itertools.pairwise(ends) if b > a
            ]  # fmt: skip
            out = torch.cat([*parts, torch.zeros_like(qkv[0][ends[-1] :])])
        else:
            out = tisa.attention(
                *qkv, scores, key_scores=of_keys, is_causal=True, enable_gqa=True, max_seqlen=399,
                cu_seqlens=torch.tensor(ends, dtype=torch.int32, device="cuda"), backend="triton",
            )  # fmt: skip
        total = out.square().sum()
        results.append([out, *torch.autograd.grad(total, [*qkv, of_keys, scores])])
    for want, got in zip(*results, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2
        assert (got.double() - want).norm() <= tolerance * want.norm()
    assert all((x[777:] == 0).all() for x in results[1][:5])


@pytest.mark.parametrize("keys", [512, 4097])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_with_key_scores(keys, key_heads, dtype):
    torch.manual_seed(0)
    query = torch.randn(3, 8, 1, 64, device="cuda").to(dtype)
    key, value = (torch.randn(3, key_heads, keys, 64, device="cuda").to(dtype) for _ in range(2))
    of_keys = torch.randn(3, 8, keys, device="cuda")
    results = []
    for kind, backend in ((torch.float64, "reference"), (dtype, "triton")):
        given = [x.to(kind) for x in (query, key, value)]
        more = {"key_scores": of_keys}
        if backend == "reference":
            more = {"attn_mask": of_keys.double().unsqueeze(2)}
        results.append(
            tisa.attention(*given, enable_gqa=True, is_causal=True, backend=backend, **more)
        )
    want, got = results
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("length", [100, 1000])
def test_gradients_of_key_scores_are_bit_identical_over_runs(length):
    torch.manual_seed(0)
    leaves = [torch.randn(2, 4, length, 64, device="cuda").bfloat16() for _ in range(3)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.randn(2, 4, length, device="cuda"))]
    scores = torch.randn(4, 2 * length - 1, device="cuda")

    def run():
        out = tisa.attention(*leaves[:3], scores, key_scores=leaves[3], backend="triton")
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    # The same shapes without key scores, and with others: never a stale launch.
    plain = tisa.attention(*leaves[:3], scores, backend="triton")
    assert not torch.equal(plain, first[0])
    others = torch.randn_like(leaves[3])
    found = tisa.attention(*leaves[:3], scores, key_scores=others, backend="triton")
    exact = tisa.attention(
        *(x.double() for x in leaves[:3]), scores.double(), attn_mask=others.double().unsqueeze(2),
        backend="reference",
    )  # fmt: skip
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("keys", [512, 4097, 32768])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding(keys, key_heads, dtype):
    torch.manual_seed(0)
    query = torch.randn(3, 8, 1, 64, device="cuda").to(dtype)
    key, value = (torch.randn(3, key_heads, keys, 64, device="cuda").to(dtype) for _ in range(2))
    vector = torch.randn(8, keys, device="cuda")
    results = [
        tisa.attention(*(x.to(kind) for x in (query, key, value)), vector, enable_gqa=True,
                       is_causal=True, backend=backend)
        for backend, kind in (("reference", torch.float64), ("triton", dtype))
    ]  # fmt: skip
    want, got = results
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - want).norm() <= tolerance * want.norm()


def test_a_very_long_sequence():
    """131,072 tokens; some rows against float64."""
    n, rows = 131_072, 8
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, n, 64, device="cuda").bfloat16() for _ in range(3)]
    leaves = [x.detach().requires_grad_() for x in qkv]
    scoring = tisa.TISA(2).cuda()
    out = tisa.attention(*leaves, scoring(n), band=scoring.band(torch.bfloat16), backend="triton")
    out.backward(torch.randn_like(out))
    assert all(torch.isfinite(x.grad).all() for x in (*leaves, *scoring.parameters()))
    for first in (0, n // 2, n - rows):
        exact = tisa.attention(
            qkv[0][:, :, first : first + rows].double(), qkv[1].double(), qkv[2].double(),
            scoring(rows, n, query_start=first), query_start=first, backend="reference",
        )  # fmt: skip
        got = out[:, :, first : first + rows].double()
        assert (got - exact).norm() <= 1e-2 * exact.norm()


def test_launches_are_remembered():
    from tisa.ops.triton import launching as launch

    qkv = [torch.randn(2, 4, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    scoring = tisa.TISA(4).cuda()
    vector = scoring(200).detach().requires_grad_()

    def step():
        out = tisa.attention(*qkv, vector, backend="triton")
        return [out.detach(), *torch.autograd.grad(out.sum(), [*qkv, vector])]

    first = step()
    assert any(shape.templates for shape in launch._shapes.values())
    expected = [x.clone() for x in first]
    del first
    for _ in range(5):
        for a, b in zip(step(), expected, strict=True):
            assert torch.equal(a, b)
    # New contents at the same addresses, other shapes at others: never a stale launch.
    for length in (100, 200, 150, 200):
        other = [torch.randn(2, 4, length, 64, device="cuda").bfloat16() for _ in range(3)]
        out = tisa.attention(*other, scoring(length), backend="triton")
        exact = tisa.attention(*(x.double() for x in other), scoring(length), backend="reference")
        assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("length", [100, 200])
@pytest.mark.parametrize("kind", ["apart", "slices of one", "one for all"])
def test_a_plan_is_launched_at_other_addresses(kind, length):
    scoring = tisa.TISA(4).cuda()
    band = scoring.band(torch.bfloat16)
    kept = []

    def drawn(*shape):
        # Small: a query that sees itself above all has a gradient that is mostly rounding.
        return (0.3 * torch.randn(*shape, device="cuda")).bfloat16()

    def tensors():
        if kind == "apart":
            return [drawn(2, 4, length, 64) for _ in range(3)]
        if kind == "one for all":
            return [drawn(2, 4, length, 64)] * 3
        return list(drawn(2, length, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind())

    for _ in range(4):
        qkv = [x.requires_grad_() for x in dict.fromkeys(tensors())]
        names = qkv if len(qkv) == 3 else qkv * 3
        vector = scoring(length).detach().requires_grad_()
        upstream = torch.randn(2, 4, length, 64, device="cuda").bfloat16()
        # What stays alive leaves no address to be used again.
        kept.append((qkv, vector, upstream))
        results = []
        for dtype, name in ((torch.bfloat16, "triton"), (torch.float64, "reference")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
            given = leaves if len(leaves) == 3 else leaves * 3
            if name == "triton":
                leaves, given = qkv, names
            out = tisa.attention(*given, vector, band=band, backend=name)
            wanted = [*leaves, vector]
            results.append([out, *torch.autograd.grad(out, wanted, upstream.to(dtype))])
            kept.append(results[-1])
        for found, exact in zip(*results, strict=True):
            assert (found.double() - exact.double()).norm() <= 2e-2 * exact.double().norm()


@pytest.mark.parametrize("scoring", [tisa.TISA, tisa.T5Buckets])
def test_a_captured_step_follows_parameters_and_band(scoring):
    torch.manual_seed(0)
    qkv = [torch.randn(2, 4, 500, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    scoring = scoring(4).cuda()
    upstream = torch.randn(2, 4, 500, 64, device="cuda").bfloat16()

    def step():
        band = scoring.band(torch.bfloat16)
        out = tisa.attention(*qkv, scoring(500), band=band, backend="triton")
        return [out, *torch.autograd.grad(out, [*qkv, *scoring.parameters()], upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
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
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}], ids=str)
def test_compiled_training_step(options):
    torch.compiler.reset()
    scoring = tisa.TISA(4).cuda()

    def run(query, key, value):
        return tisa.attention(
            query, key, value, scoring(query.shape[2]), backend="triton", **options
        )

    compiled = torch.compile(run, fullgraph=True)
    qkv = [torch.randn(2, 4, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    found = []
    for function in (run, compiled):
        torch.manual_seed(3)
        out = function(*qkv)
        wanted = [*qkv, *scoring.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_auto_takes_it():
    from tisa.ops import api

    qkv = [torch.randn(1, 2, 300, 64, device="cuda").bfloat16() for _ in range(3)]
    chosen = []
    choose = api.choose_backend
    api.choose_backend = lambda call: chosen.append(choose(call)) or chosen[-1]
    try:
        tisa.attention(*qkv, tisa.TISA(2).cuda()(300))
        tisa.attention(*qkv)
    finally:
        api.choose_backend = choose
    assert chosen == ["triton", "sdpa"]


def test_auto_takes_it_in_a_compiled_graph():
    torch.compiler.reset()
    targets = []

    def looking(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    scoring = tisa.TISA(2).cuda()
    run = torch.compile(
        lambda x: tisa.attention(x, x, x, scoring(300), band=scoring.band(x.dtype)),
        fullgraph=True, backend=looking,
    )  # fmt: skip
    run(torch.randn(1, 2, 300, 64, device="cuda").bfloat16())
    assert any("triton_forward" in target for target in targets), targets
