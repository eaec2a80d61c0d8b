"""`chunked` never writes an n × n tensor: counted, and at full size measured."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tisa
from tisa.ops import chunked

pytestmark = pytest.mark.unchecked


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize(
    ("length", "heads"), [(4096, 12), pytest.param(20_000, 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_no_tensor_of_n_squared(length, heads, options):
    # The body of the operator, below autograd: a dispatch mode does not see into an operator.
    query, key, value = (torch.randn(1, heads, length, 8) for _ in range(3))
    vector = tisa.TISA(heads)(length).detach()
    # Scores of keys in one of the two.
    for_keys = torch.randn(1, heads, length) if options else None
    rest = (None, for_keys, None, None, 0, 0, None, 0 if options else None, 0.3, 0.0)
    with Largest() as largest:
        output, _, norms = chunked._forward._init_fn(query, key, value, vector, *rest)
        grads = (torch.ones_like(output), torch.zeros(1, heads, length), norms)
        needs = [*[True] * 4, False, bool(options)]
        chunked._backward._init_fn(*grads, query, key, value, vector, *rest, needs)
    # A block, its padding included; n² alone would be 16 million for one head of 4,096.
    assert largest.elements <= max(2 * 2**20, 260 * (length + 260), heads * length * 16)
    assert largest.elements < heads * length**2 / 10


@pytest.mark.parametrize(("heads", "key_heads"), [(32, 1), (32, 32)])
def test_grouped_heads_keep_to_the_block(heads, key_heads):
    tensors = [torch.randn(1, h, n, 8) for h, n in ((heads, 300), (key_heads, 4096),
                                                    (key_heads, 4096))]  # fmt: skip
    vector = torch.randn(heads, 4395)
    rest = (None, None, None, None, 0, 0, None, None, 0.3, 0.0)
    with Largest() as largest:
        chunked._forward._init_fn(*tensors, vector, *rest)
    assert largest.elements <= 1.1 * 2**20


def test_an_empty_batch_costs_nothing():
    qkv = [torch.zeros(0, 1, 12_000, 8, requires_grad=True) for _ in range(3)]
    vector = torch.zeros(1, 23_999, requires_grad=True)
    for backend in ("auto", "chunked", "sdpa"):
        with Largest() as largest:
            out = tisa.attention(*qkv, vector, backend=backend)
            out.sum().backward()
        assert out.shape == (0, 1, 12_000, 8)
        assert largest.elements < 100_000


@pytest.mark.full
def test_a_tenth_of_the_memory_of_the_reference(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import attention as benchmark

    case = benchmark.Case(4096, 1)
    ours, theirs = (
        benchmark.cpu_peak(name, case, training=True) for name in ("chunked", "reference")
    )
    assert ours <= theirs / 10
