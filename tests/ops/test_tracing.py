"""torch.compile and torch.export: one graph, any length, the same numbers as eager code."""

import shutil
from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tisa
from cases import CASES, KEYED, leaves
from tisa import offsets

pytestmark = pytest.mark.unchecked

BACKENDS = ["reference", "chunked", "sdpa", "auto"]
ALL = [*CASES, *KEYED]


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch.compiler.reset()


class Layer(torch.nn.Module):
    """Attention as a user writes it."""

    def __init__(self, scoring, backend="auto", **options):
        super().__init__()
        self.scoring, self.backend, self.options = scoring, backend, options
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return tisa.attention(
            query,
            key,
            value,
            self.scoring(x.shape[1]),
            band=self.scoring.support(1e-4),
            backend=self.backend,
            **self.options,
        )


def outputs_and_gradients(function, layer, x):
    torch.manual_seed(9)
    layer.zero_grad()
    out = function(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def few(pairs, small):
    """Return the pairs as parameters; all but those for which `small` holds are heavy."""
    return [pytest.param(*pair, marks=() if small(*pair) else pytest.mark.full) for pair in pairs]


OPTIONS = ({}, {"is_causal": True}, {"window": 4}, {"dropout_p": 0.3})


@pytest.mark.parametrize(
    ("backend", "options"),
    few(
        product(BACKENDS, OPTIONS),
        lambda backend, options: (
            "window" not in options if backend == "auto" else not options and backend != "chunked"
        ),
    ),
)
def test_one_graph_for_any_length(backend, options):
    layer = Layer(tisa.TISA(4), backend, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for length in (5, 13, 200):
        x = torch.randn(2, length, 16)
        expected = outputs_and_gradients(layer, layer, x)
        found = outputs_and_gradients(compiled, layer, x)
        graphs.add(counter.frame_count)
        if backend == "sdpa" and "dropout_p" in options:
            continue  # PyTorch's own mask, drawn in another order
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    # The first length compiles, the backward pass included; the others find it done.
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("backend", "case"),
    few(
        product(["reference", "chunked", "sdpa"], ALL),
        # The other two are PyTorch's own operations.
        lambda backend, case: (
            backend == "chunked" and KEYED.index(case) % 6 == 0
            if case in KEYED
            else backend == "chunked" or CASES.index(case) % 5 == 0
        ),
    ),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_case_compiles_without_a_break(backend, case):
    qkv, scoring, options = case.make()
    run = lambda *tensors: case.call(backend, tensors, scoring, options)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = run(*qkv)
    found = compiled(*qkv)
    torch.testing.assert_close(found, expected)
    wanted = leaves(qkv, scoring, options)
    for a, b in zip(
        torch.autograd.grad(found.sum(), wanted),
        torch.autograd.grad(expected.sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_packed_batches_compile(backend):
    scoring = tisa.TISA(4)

    def run(query, key, value, ends):
        return tisa.attention(
            query, key, value, scoring(9), cu_seqlens=ends, max_seqlen=9, backend=backend
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for ends in ([0, 3, 12, 14], [0, 9, 12, 20]):
        ends = torch.tensor(ends, dtype=torch.int32)
        tensors = [torch.randn(int(ends[-1]), 4, 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*tensors, ends), run(*tensors, ends))
    # What eager code refuses, a compiled graph refuses too.
    with pytest.raises(RuntimeError, match="longer than max_seqlen"):
        compiled(*tensors, torch.tensor([0, 1, 2, 20], dtype=torch.int32))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_moving_start_and_band_do_not_recompile(backend):
    scoring = tisa.TISA(2)
    counter = CompileCounterWithBackend("aot_eager")

    def step(query, key, value, position):
        vector = scoring(1, key.shape[2], query_start=position)
        return tisa.attention(
            query,
            key,
            value,
            vector,
            band=scoring.support(1e-3),
            query_start=position,
            is_causal=True,
            backend=backend,
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    graphs = set()
    key, value = torch.randn(2, 1, 2, 32, 8)
    for position in range(0, 32, 5):
        query = torch.randn(1, 2, 1, 8)
        where = torch.tensor(position)
        torch.testing.assert_close(
            compiled(query, key, value, where), step(query, key, value, where)
        )
        graphs.add(counter.frame_count)
        with torch.no_grad():
            scoring.kernel_offsets.add_(1.0)
    assert len(graphs) == 1


def test_compiled_dropout_drops_what_eager_dropout_drops():
    qkv = [torch.randn(2, 4, 50, 8) for _ in range(3)]
    vector = torch.randn(4, 99)
    for backend in ("reference", "chunked"):
        run = lambda backend=backend: tisa.attention(  # noqa: E731
            *qkv, vector, dropout_p=0.5, backend=backend
        )
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.manual_seed(4)
        expected = [run(), run()]
        torch.manual_seed(4)
        found = [compiled(), compiled()]
        assert not torch.equal(*expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_torch_func_inside_a_compiled_graph():
    qkv = [torch.randn(2, 4, 9, 8) for _ in range(3)]
    vector, tangent = torch.randn(4, 17), torch.randn(4, 17)

    def loss(vector, backend="auto"):
        return tisa.attention(*qkv, vector, backend=backend).square().sum()

    def derivatives(vector, tangent):
        along = torch.func.jvp(loss, (vector,), (tangent,))[1]
        return along, torch.func.grad(loss)(vector), torch.vmap(loss)(vector[None])

    expected = derivatives(vector, tangent)
    compiled = torch.compile(derivatives, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(vector, tangent), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(vector, tangent)
        found = torch.compile(loss, fullgraph=True, backend="aot_eager")(dual)
        along = torch.autograd.forward_ad.unpack_dual(found).tangent
        torch.testing.assert_close(along, expected[0])
    refused = torch.compile(torch.func.grad(lambda v: loss(v, "chunked")), backend="aot_eager")
    with pytest.raises(ValueError, match="forward-mode"):
        refused(vector)


SCORING = [
    tisa.TISA, tisa.TISAv2, tisa.T5Buckets, tisa.ALiBi, tisa.KerpleLog, tisa.KerplePower,
    tisa.NearFar,
]  # fmt: skip


@pytest.mark.parametrize("build", SCORING)
def test_every_scoring_function_compiles_and_exports_with_any_length(build):
    scoring = build(4)

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scoring = scoring

        def forward(self, query, key):
            return self.scoring.matrix(query.shape[0], key.shape[0])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Dense(), fullgraph=True, dynamic=True, backend=counter)
    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    exported = torch.export.export(
        Dense(), (torch.ones(6), torch.ones(9)), dynamic_shapes=({0: queries}, {0: keys})
    ).module()
    graphs = set()
    for sizes in ((3, 5), (7, 4), (300, 200)):
        inputs = [torch.ones(n) for n in sizes]
        expected = scoring.matrix(*sizes)
        torch.testing.assert_close(compiled(*inputs), expected)
        torch.testing.assert_close(exported(*inputs), expected)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


def test_the_adjoint_exports_with_any_length():
    class Sum(torch.nn.Module):
        def forward(self, matrix):
            return offsets.sum_diagonals(matrix)

    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    exported = torch.export.export(
        Sum(), (torch.randn(2, 4, 6),), dynamic_shapes=({1: queries, 2: keys},)
    ).module()
    matrix = torch.randn(2, 9, 5)
    torch.testing.assert_close(exported(matrix), offsets.sum_diagonals(matrix))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_export_with_any_batch_and_length(backend, options):
    layer = Layer(tisa.TISA(4), backend, **options).eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    program = torch.export.export(
        layer, (torch.randn(2, 7, 16),), dynamic_shapes=({0: batch, 1: length},)
    )
    exported = program.module()
    for size in ((2, 7), (3, 4), (1, 300)):
        x = torch.randn(*size, 16)
        torch.testing.assert_close(exported(x), layer(x))
    own = {str(node.target) for node in program.graph.nodes if "tisa" in str(node.target)}
    # What "auto" exports runs where this package is not installed.
    assert bool(own) == (backend == "chunked")


def test_an_exported_decoder_takes_a_prompt_too():
    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scoring = tisa.TISA(2)

        def forward(self, query, key, value):
            vector = self.scoring(query.shape[2], key.shape[2])
            return tisa.attention(query, key, value, vector, is_causal=True)

    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    decoder, example = Decoder(), [torch.randn(1, 2, n, 4) for n in (5, 9, 9)]
    program = torch.export.export(
        decoder, tuple(example), dynamic_shapes=({2: queries}, {2: keys}, {2: keys})
    )
    for sizes in ((5, 9), (9, 9), (3, 20)):
        tensors = [torch.randn(1, 2, n, 4) for n in (sizes[0], sizes[1], sizes[1])]
        torch.testing.assert_close(program.module()(*tensors), decoder(*tensors))


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Not the one of all processes: a job killed while writing leaves half a library there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.mark.usefixtures("own_cache")
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="Inductor needs a C++ compiler on the CPU",
)
class TestInductor:
    @pytest.mark.full
    @pytest.mark.parametrize("backend", ["chunked", "reference"])
    def test_one_graph_for_any_length(self, backend):
        layer = Layer(tisa.TISA(4), backend, is_causal=True)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for length in (5, 40):
            x = torch.randn(2, length, 16)
            expected = outputs_and_gradients(layer, layer, x)
            for a, b in zip(outputs_and_gradients(compiled, layer, x), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.full
    @pytest.mark.parametrize("build", SCORING)
    def test_every_scoring_function(self, build):
        layer = Layer(build(4), "chunked", dropout_p=0.3)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for length in (5, 40):
            x = torch.randn(2, length, 16)
            expected = outputs_and_gradients(layer, layer, x)
            for a, b in zip(outputs_and_gradients(compiled, layer, x), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
