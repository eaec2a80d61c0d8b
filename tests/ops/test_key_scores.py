"""A score for each key: what it is for, and what it does beside everything else."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tisa
from tisa.ops import blocks, repeats, triton

BACKENDS = ["reference", "chunked", "sdpa"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def tensors(*sizes, dtype=torch.float64, batch=2, dim=4):
    """Return query, key and value of (heads, length)."""
    return [torch.randn(batch, *size, dim, dtype=dtype, requires_grad=True) for size in sizes]


@every_backend
def test_the_forgetting_transformer(backend):
    """Its paper's formula: between key and query the logarithms of all gates are summed."""
    n = 7
    query, key, value = tensors((3, n), (3, n), (3, n))
    gates = torch.randn(2, 3, n, dtype=torch.float64, requires_grad=True)
    logarithms = torch.nn.functional.logsigmoid(gates)
    rows = []
    for i in range(n):
        sums = torch.stack([logarithms[..., j + 1 : i + 1].sum(-1) for j in range(i + 1)], -1)
        logits = torch.einsum("bhd,bhjd->bhj", query[:, :, i], key[:, :, : i + 1]) / 2 + sums
        rows.append(torch.einsum("bhj,bhjd->bhd", logits.softmax(-1), value[:, :, : i + 1]))
    expected = torch.stack(rows, 2)
    found = tisa.attention(
        query, key, value, key_scores=-logarithms.cumsum(-1), is_causal=True, backend=backend
    )
    torch.testing.assert_close(found, expected)
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    leaves = (query, key, value, gates)
    wanted = torch.autograd.grad(expected, leaves, weight, retain_graph=True)
    for got, want in zip(torch.autograd.grad(found, leaves, weight), wanted, strict=True):
        torch.testing.assert_close(got, want)


@every_backend
def test_blocks_and_lanes_add_up(backend, monkeypatch):
    """Blocks of few queries and heads, grouped, some keys beyond a block's reach."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", (60, 4))
    results = []
    for name in ("reference", backend):
        torch.manual_seed(1)
        leaves = [*tensors((4, 9), (2, 13), (2, 13)), torch.randn(2, 4, 13).double()]
        leaves.append(torch.randn(4, 21).double())
        query, key, value, for_keys, vector = (x.detach().requires_grad_() for x in leaves)
        out = tisa.attention(
            query, key, value, vector, key_scores=for_keys, window=(3, 1), enable_gqa=True,
            backend=name,
        )  # fmt: skip
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
        wanted = (for_keys, query, key, value, vector)
        results.append([out, *torch.autograd.grad(out, wanted, upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("with_scores", [True, False])
@every_backend
def test_packed(backend, with_scores):
    """As the sequences alone, also its gradient; tokens of no sequence get none."""
    ends = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32)
    packed = [torch.randn(14, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    packed.append(torch.randn(14, 4, dtype=torch.float64))
    packed[3][5] = -torch.inf
    packed = [x.requires_grad_() for x in packed]
    vector = torch.randn(4, 15, dtype=torch.float64) if with_scores else None
    options = {"enable_gqa": True, "is_causal": True, "backend": backend}
    out = tisa.attention(
        *packed[:3], vector, key_scores=packed[3], cu_seqlens=ends, max_seqlen=8, **options
    )
    found = torch.autograd.grad(out.square().sum(), packed)
    alone = [torch.zeros_like(x) for x in packed]
    for first, last in ((0, 4), (4, 11), (11, 12)):
        n = last - first
        given = [x.detach()[first:last].transpose(0, 1)[None].requires_grad_() for x in packed]
        part = tisa.attention(
            *given[:3], None if vector is None else vector[:, 8 - n : 7 + n],
            key_scores=given[3], **options | {"backend": "reference"},
        )  # fmt: skip
        torch.testing.assert_close(out[first:last], part[0].transpose(0, 1))
        for whole, one in zip(alone, torch.autograd.grad(part.square().sum(), given), strict=True):
            whole[first:last] = one[0].transpose(0, 1)
    for got, want in zip(found, alone, strict=True):
        torch.testing.assert_close(got, want)
    assert (found[3][12:] == 0).all()


@every_backend
def test_decoding_with_a_cache(backend):
    """Keys keep their scores: one query at a time, the cache growing or of a fixed size."""
    scoring, n, room = tisa.NearFar(2).double(), 6, 9
    query, key, value = (x.detach() for x in tensors((2, n), (2, n), (2, n)))
    for_keys = torch.rand(2, 2, n, dtype=torch.float64).cumsum(-1)
    whole = tisa.attention(query, key, value, scoring(n), key_scores=for_keys, is_causal=True,
                           backend="reference")  # fmt: skip
    static = [torch.zeros(2, 2, room, 4).double() for _ in range(2)]
    # What stands behind the last key does not count.
    of_static = torch.full((2, 2, room), 1e6, dtype=torch.float64)
    for i in range(n):
        step, options = query[:, :, i : i + 1], {"is_causal": True, "backend": backend}
        growing = tisa.attention(
            step, key[:, :, : i + 1], value[:, :, : i + 1], scoring(1, i + 1),
            key_scores=for_keys[..., : i + 1], **options,
        )  # fmt: skip
        torch.testing.assert_close(growing, whole[:, :, i : i + 1])
        static[0][:, :, i], static[1][:, :, i] = key[:, :, i], value[:, :, i]
        of_static[..., i] = for_keys[..., i]
        place = torch.tensor(i)
        fixed = tisa.attention(
            step, *static, scoring(1, room, query_start=place), key_scores=of_static,
            query_start=place, **options,
        )  # fmt: skip
        torch.testing.assert_close(fixed, whole[:, :, i : i + 1])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_constant_changes_the_log_sum_exp_alone(backend):
    query, key, value = tensors((2, 5), (2, 8), (2, 8))
    for_keys, constant = torch.randn(2, 2, 8).double(), torch.randn(2, 2, 1).double()
    (a, before), (b, after) = (
        tisa.attention(query, key, value, key_scores=scores, return_lse=True, backend=backend)
        for scores in (for_keys, for_keys + constant)
    )
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(after - before, constant.expand_as(before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_it_in_float32(backend):
    query, key, value = (x.float().detach() for x in tensors((2, 9), (2, 9), (2, 9)))
    for_keys = torch.randn(2, 2, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tisa.attention(query, key, value, key_scores=for_keys, backend=backend)
    cast = [x.bfloat16() for x in (query, key, value)]
    expected = tisa.attention(*cast, key_scores=for_keys, backend=backend)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.float().sum(), for_keys)
    assert gradient.dtype == torch.float32


@pytest.mark.unchecked
def test_functional_transforms():
    query, key, value = (x.detach() for x in tensors((2, 5), (2, 6), (2, 6), batch=3))
    for_keys = torch.randn(3, 2, 6, dtype=torch.float64)

    def loss(for_keys, query=query[:1], backend="auto"):
        out = tisa.attention(query, key[:1], value[:1], key_scores=for_keys, backend=backend)
        return out.square().sum()

    each = torch.stack([loss(x[None]) for x in for_keys])
    torch.testing.assert_close(torch.vmap(lambda x: loss(x[None]))(for_keys), each)
    leaf = for_keys[:1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, backend="chunked"), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(for_keys[:1]), expected)
    _, tangent = torch.func.jvp(loss, (for_keys[:1],), (torch.ones(1, 2, 6).double(),))
    torch.testing.assert_close(tangent, expected.sum(), atol=1e-9, rtol=1e-6)
    with pytest.raises(ValueError, match="forward-mode"):
        torch.func.grad(lambda x: loss(x, backend="chunked"))(for_keys[:1])
    assert torch.autograd.gradgradcheck(
        lambda x: loss(x, backend="reference"), for_keys[:1].clone().requires_grad_()
    )


class Gated(torch.nn.Module):
    """Attention with a gate, as a user writes it."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.qkv, self.gate = torch.nn.Linear(8, 24), torch.nn.Linear(8, 2)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        gates = torch.nn.functional.logsigmoid(self.gate(x).float())
        return tisa.attention(
            query, key, value, key_scores=-gates.cumsum(1).transpose(1, 2),
            is_causal=True, backend=self.backend,
        )  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "backend",
    ["chunked", *[pytest.param(x, marks=pytest.mark.full) for x in ("reference", "sdpa")]],
)
def test_one_graph_for_any_length(backend):
    torch.compiler.reset()
    layer = Gated(backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for length in (5, 13, 40):
        x, results = torch.randn(2, length, 8), []
        for function in (layer, compiled):
            layer.zero_grad()
            out = function(x)
            out.square().sum().backward()
            results.append([out, *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_export_with_any_batch_and_length(backend):
    layer = Gated(backend).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    program = torch.export.export(
        layer, (torch.randn(2, 7, 8),), dynamic_shapes=({0: batch, 1: length},)
    )
    for size in ((2, 7), (3, 4), (1, 40)):
        x = torch.randn(*size, 8)
        torch.testing.assert_close(program.module()(x), layer(x))
    own = {str(node.target) for node in program.graph.nodes if "tisa" in str(node.target)}
    assert bool(own) == (backend == "chunked")


@pytest.mark.unchecked
def test_a_call_known_without_scores_of_keys_is_another(monkeypatch):
    """What is repeated without being looked at has no scores of keys."""
    monkeypatch.setattr(repeats, "find", lambda signature: lambda *tensors: tensors[0] * torch.nan)
    monkeypatch.setattr(triton, "refuses", lambda call: "it was looked at")
    query, key, value = (x.half().detach() for x in tensors((2, 5), (2, 5), (2, 5)))
    assert tisa.attention(query, key, value, backend="triton").isnan().all()
    with pytest.raises(ValueError, match="it was looked at"):
        tisa.attention(query, key, value, key_scores=torch.zeros(2, 2, 5), backend="triton")


@pytest.mark.skipif(not triton.interpreted(), reason="on a GPU: test_gpu_gates.py")
@pytest.mark.parametrize("length", [70, 140])
def test_gates_get_their_gradient_however_the_output_is_rounded(length):
    """A gate's gradient is a cumulative sum of what sums to 0: it must sum to 0 in every row."""

    def gradient(backend, dtype):
        torch.manual_seed(0)
        query, key, value = (torch.randn(2, 1, length, 16).to(dtype) for _ in range(3))
        gates = torch.randn(2, 1, length).to(torch.promote_types(dtype, torch.float32)) + 3
        sums = torch.nn.functional.logsigmoid(gates.requires_grad_()).cumsum(-1)
        # Values that hardly differ: what is left of a sum is small beside its rounding.
        out, lse = tisa.attention(
            query, key, value + 4, key_scores=-sums, is_causal=True, return_lse=True,
            backend=backend,
        )  # fmt: skip
        weight = torch.randn(2, 1, length, 16)
        total = (out * weight.to(dtype)).double().sum() + (lse * weight[..., 0]).double().sum()
        return torch.autograd.grad(total, gates)[0].double()

    exact = gradient("reference", torch.float64)
    off = (gradient("triton", torch.float16) - exact).norm() / exact.norm()
    assert off < 2e-3
