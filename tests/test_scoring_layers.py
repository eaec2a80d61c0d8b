"""The scores of all layers at once are those of each layer by itself."""

import copy

import pytest
import torch

import tisa
from tisa.scoring import bands_of, layers, scores_of

HEADS = 3
EVERY = {
    "tisa": lambda: tisa.TISA(HEADS, 4),
    "tisa-v2": lambda: tisa.TISAv2(HEADS, 4, num_agnostic_heads=1),
    "t5": lambda: tisa.T5Buckets(HEADS),
    "alibi": lambda: tisa.ALiBi(HEADS),
    "kerple-log": lambda: tisa.KerpleLog(HEADS),
    "kerple-power": lambda: tisa.KerplePower(HEADS),
    "near-far": lambda: tisa.NearFar(HEADS, 4),
}


def evaluated(monkeypatch):
    """Return a list that every evaluation of a scoring function's formula is written to."""
    calls = []
    for cls in layers.OURS:
        own = cls.scores

        def counted(self, offsets, own=own):
            calls.append(type(self).__name__)
            return own(self, offsets)

        monkeypatch.setattr(cls, "scores", counted)
    return calls


def gradients(vectors, functions):
    """Return the gradients of something in which every vector counts differently."""
    loss = sum((number + 1) * v.square().sum() for number, v in enumerate(vectors))
    return torch.autograd.grad(loss, [p for f in functions for p in f.parameters()])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("start", [None, 4, torch.tensor(2)], ids=str)
def test_every_function_in_one_evaluation(name, start, monkeypatch):
    functions = [EVERY[name]().double() for _ in range(4)]
    apart = [f(5, 8, query_start=start) for f in functions]
    calls = evaluated(monkeypatch)
    together = scores_of(functions, 5, 8, query_start=start)
    assert len(calls) == (2 if name == "near-far" else 1)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    if name != "alibi":
        found, expected = gradients(together, functions), gradients(apart, functions)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        again = gradients(scores_of(functions, 5, 8, query_start=start), functions)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_band(name, dtype):
    functions = [EVERY[name]() for _ in range(4)]
    for one, function in zip(bands_of(functions, dtype), functions, strict=True):
        expected = function.band(dtype)
        assert one is expected is None or torch.equal(one, expected)


class Own(tisa.ScoringFunction):
    """A user's function, whose formula nobody knows."""

    def scores(self, offsets):
        return offsets.abs().float().expand(self.num_attention_heads, *offsets.shape)

    def support(self, eps):
        return None


def test_functions_of_all_kinds_in_their_order(monkeypatch):
    shared = tisa.TISA(HEADS)
    functions = [
        shared, tisa.T5Buckets(HEADS), Own(HEADS), tisa.TISA(HEADS), tisa.TISA(HEADS, 2), shared,
        tisa.TISA(HEADS).double(), tisa.T5Buckets(HEADS, 16), tisa.T5Buckets(HEADS),
    ]  # fmt: skip
    expected = [function(9) for function in functions]
    calls = evaluated(monkeypatch)
    found = scores_of(functions, 9)
    assert len(calls) == 5
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    assert found[0] is found[5]
    bands = bands_of(functions, torch.float32)
    assert bands[2] is None
    assert torch.equal(bands[3], functions[3].band(torch.float32))
    assert scores_of([], 9) == bands_of([], torch.float32) == []


def hooked(function):
    function.register_forward_hook(lambda *_: None)


def draws(function):
    function.kernel_dropout = 0.5


def replaced(function):
    function.forward = function.forward


@pytest.mark.parametrize(
    ("build", "change"),
    [(tisa.TISA, hooked), (tisa.TISAv2, draws), (tisa.TISA, replaced)],
    ids=lambda x: x.__name__,
)
def test_what_has_to_be_called_is_called(build, change, monkeypatch):
    functions = [build(HEADS) for _ in range(3)]
    for function in functions:
        change(function)
    calls = evaluated(monkeypatch)
    scores_of(functions, 7)
    assert len(calls) == 3


def test_a_function_without_its_memory_is_asked_by_itself():
    functions = [tisa.TISA(HEADS) for _ in range(3)]
    functions[1].kernel_offsets.untyped_storage().resize_(0)
    assert layers.kind_of(functions[1]) is None
    assert layers.kind_of(functions[0]) == layers.kind_of(functions[2]) is not None


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("position", ["tisa", "near-far", "t5"])
def test_a_transformer_makes_them_once_a_pass(position, checkpointing, monkeypatch):
    config = tisa.TransformerConfig(
        position=position, num_hidden_layers=3, hidden_size=16, num_attention_heads=2,
        intermediate_size=16, vocab_size=20,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tisa.Transformer(config).train()
    model.dropout.p = 0.0
    model.activation_checkpointing = checkpointing
    apart = copy.deepcopy(model)
    ids = torch.randint(20, (2, 9))
    with monkeypatch.context() as alone:
        alone.setattr(layers, "OURS", ())
        torch.manual_seed(1)
        apart(ids).square().sum().backward()
    calls = evaluated(monkeypatch)
    torch.manual_seed(1)
    model(ids).square().sum().backward()
    assert len(calls) == (2 if position == "near-far" else 1)
    for (name, one), other in zip(model.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["tisa", "t5", "near-far"])
def test_compiled_for_any_length(name):
    torch.compiler.reset()
    functions = [EVERY[name]() for _ in range(3)]
    compiled = torch.compile(
        lambda n: scores_of(functions, n, n + 2), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (5, 40):
        for one, function in zip(compiled(length), functions, strict=True):
            torch.testing.assert_close(one, function(length, length + 2))


def test_torch_func_looks_into_them():
    functions = torch.nn.ModuleList(tisa.TISA(HEADS).double() for _ in range(3))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.functions = functions

        def forward(self, length):
            return torch.stack(scores_of(self.functions, length)).square().sum()

    model = Model()
    values = dict(model.named_parameters())
    found = torch.func.grad(lambda v: torch.func.functional_call(model, v, (6,)))(values)
    expected = torch.autograd.grad(model(6), list(values.values()))
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", EVERY)
def test_on_a_gpu_one_launch_makes_them(name, monkeypatch):
    """A GPU that is imagined: its kernels are interpreted here."""
    pytest.importorskip("triton", reason="interprets Triton's kernels")
    from tisa.ops import triton as backend

    if not backend.interpreted():
        pytest.skip("with a GPU the kernels are compiled: test_gpu_scoring.py")
    from tisa.scoring.triton import launches

    functions = [EVERY[name]() for _ in range(3)]
    apart, bands = [f(6, 9) for f in functions], [f.band(torch.float32) for f in functions]
    calls = evaluated(monkeypatch)
    monkeypatch.setattr(layers, "GPUS", ("cpu",))
    launched = []
    for known in ("scores", "bands"):
        own = getattr(launches, known)
        monkeypatch.setattr(
            launches,
            known,
            lambda *given, own=own, known=known: launched.append(known) or own(*given),
        )
    for one, other in zip(scores_of(functions, 6, 9), apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(bands_of(functions, torch.float32), bands, strict=True):
        assert one is other is None or (one - other).abs().max() <= 1
    expected = [] if name == "alibi" else ["scores", "bands"] if name == "tisa" else ["scores"]
    assert launched == expected
    assert len(calls) == (name == "alibi")
    # What torch.func looks into is the module itself.
    torch.func.vmap(lambda x: scores_of(functions, 6, 9)[0].sum() * x)(torch.ones(2))
    assert launched == expected


def test_what_nothing_changes_is_made_once_on_a_gpu(monkeypatch):
    function, asked = tisa.ALiBi(3), []
    forward = tisa.ALiBi.scores
    monkeypatch.setattr(
        tisa.ALiBi, "scores", lambda self, offsets: asked.append(1) or forward(self, offsets)
    )
    expected = function(4, 6)
    scores_of([function], 4, 6)
    scores_of([function], 4, 6)
    assert len(asked) == 3  # on a CPU each call asks
    monkeypatch.setattr(layers, "GPUS", ("cpu",))
    monkeypatch.setattr(layers, "_made", {})
    asked.clear()
    with torch.inference_mode():
        first = scores_of([function, tisa.ALiBi(3)], 4, 6)
    again = scores_of([function], 4, 6)
    assert len(asked) == 1
    for found in (*first, *again):
        assert torch.equal(found, expected)
    # Saved for a backward pass, though first made for inference.
    assert not again[0].is_inference()
    for other in ((5, 6, None), (4, 6, 1)):
        found = scores_of([function], *other[:2], query_start=other[2])[0]
        assert torch.equal(found, function(*other[:2], query_start=other[2]))
    for length in range(40):
        scores_of([function], length)
    assert len(layers._made) <= layers._MOST
    scores_of([function.double()], 4, 6)
    assert scores_of([function], 4, 6)[0].dtype == torch.float64
