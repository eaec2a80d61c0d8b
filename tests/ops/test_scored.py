"""A scoring function in place of its scores: the same as with the vector that it makes."""

import pytest
import torch

import tisa
from tisa.ops import api, scored

HEADS = 4
EVERY = {
    "tisa": lambda: tisa.TISA(HEADS),
    "tisa-v2": lambda: tisa.TISAv2(HEADS),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "alibi": lambda: tisa.ALiBi(HEADS),
    "kerple-log": lambda: tisa.KerpleLog(HEADS),
    "kerple-power": lambda: tisa.KerplePower(HEADS),
    "near-far": lambda: tisa.NearFar(HEADS),
}


def tensors(queries, keys, **like):
    torch.manual_seed(0)
    sizes = (queries, keys, keys)
    return [torch.randn(2, HEADS, n, 8, **like).requires_grad_() for n in sizes]


def outputs_and_gradients(scoring, given, qkv, **options):
    out = tisa.attention(*qkv, given, **options)
    wanted = [*qkv, *scoring.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("start", [None, 3, torch.tensor(2)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_it_is_what_its_vector_is(name, start, backend):
    scoring, qkv = EVERY[name](), tensors(5, 7)
    vector = scoring(5, 7, query_start=start)
    options = dict(query_start=start, backend=backend)
    for one, other in zip(
        outputs_and_gradients(scoring, scoring, qkv, **options),
        outputs_and_gradients(scoring, vector, qkv, **options),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", EVERY)
def test_in_a_packed_batch(name):
    scoring, ends = EVERY[name](), torch.tensor([0, 3, 10], dtype=torch.int32)
    qkv = [torch.randn(10, HEADS, 8) for _ in range(3)]
    options = dict(cu_seqlens=ends, max_seqlen=7)
    found = tisa.attention(*qkv, scoring, **options)
    assert torch.equal(found, tisa.attention(*qkv, scoring(7), **options))


def test_any_function_of_the_lengths_will_do():
    qkv = tensors(5, 7)
    asked = []

    def flat(queries, keys):
        asked.append((queries, keys))
        return torch.arange(float(queries + keys - 1)).expand(HEADS, -1)

    found = tisa.attention(*qkv, flat)
    assert torch.equal(found, tisa.attention(*qkv, torch.arange(11.0).repeat(HEADS, 1)))
    assert asked == [(5, 7)]


@pytest.mark.parametrize(
    ("keys", "backend", "autocast", "dtype"),
    [
        (9, "triton", None, torch.float32),
        (9, "triton", torch.float16, torch.float16),
        (8, "triton", None, None),
        (9, "chunked", None, None),
        (9, "auto", None, None),
    ],
)
def test_its_band_is_made_where_it_saves_work(keys, backend, autocast, dtype, monkeypatch):
    """For the dtype that attention computes in, on the backend that leaves things out."""
    calls = []

    class Seen:
        @staticmethod
        def refuses(call):
            calls.append(call)
            return "it only looks"

    monkeypatch.setattr(scored, "FEW_KEYS", 8)
    monkeypatch.setattr(api, "_backend", lambda name: Seen)
    monkeypatch.setattr(api, "choose_backend", lambda call: "any")
    scoring = tisa.TISA(HEADS)
    with (
        torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
        pytest.raises(ValueError, match="it only looks"),
    ):
        tisa.attention(*tensors(5, keys), scoring, backend=backend)
    (call,) = calls
    if dtype is None:
        assert call.band is None
    else:
        assert torch.equal(call.band, scoring.band(dtype))


class Layer(torch.nn.Module):
    """Attention as the README has it."""

    def __init__(self, scoring):
        super().__init__()
        self.scoring, self.qkv = scoring, torch.nn.Linear(16, 3 * HEADS * 4)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
        return tisa.attention(*qkv, self.scoring)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["tisa", "t5"])
def test_it_compiles_into_one_graph_and_is_exported(name):
    torch.compiler.reset()
    layer, x = Layer(EVERY[name]()), torch.randn(2, 6, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    length = torch.export.Dim("length", min=2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: length},))
    longer = torch.randn(2, 19, 16)
    torch.testing.assert_close(program.module()(longer), layer(longer))


def test_torch_func_looks_into_it():
    layer, x = Layer(tisa.TISA(HEADS)).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    values = dict(layer.named_parameters())

    def loss(values):
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    found = torch.func.grad(loss)(values)
    expected = torch.autograd.grad(loss(values), list(values.values()))
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other)
