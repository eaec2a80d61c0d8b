"""The fused operators as PyTorch's tracers see them, interpreted on the CPU."""

import copy
import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tisa
from tisa.ops.triton import interpreted, operators

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(not interpreted(), reason="with a GPU: test_gpu.py"),
]


def arguments(requires_grad=True, **changes):
    torch.manual_seed(0)
    found = dict(
        query=torch.randn(1, 2, 20, 16), key=torch.randn(1, 2, 20, 16),
        value=torch.randn(1, 2, 20, 16), scores=torch.randn(2, 39), key_scores=None,
        band=torch.tensor([[-5, 5], [0, 9]], dtype=torch.int32), mask=None, seed=None,
        cu_seqlens=None, start_pointer=None, max_seqlen=0, start=0, left=None, right=None,
        scale=0.25, dropout_p=0.0, inference=False,
    ) | changes  # fmt: skip
    for name in ("query", "key", "value", "scores", "key_scores"):
        if found[name] is not None:
            found[name].requires_grad_(requires_grad)
    return tuple(found.values())


CHANGES = {
    "plain": {},
    "causal": {"right": 0},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor(7, dtype=torch.int32)},
    "as a projection leaves it": {"query": torch.randn(1, 20, 2, 16).transpose(1, 2)},
    "packed": {
        "query": torch.randn(30, 2, 16), "key": torch.randn(30, 2, 16),
        "value": torch.randn(30, 2, 16), "max_seqlen": 20,
        "cu_seqlens": torch.tensor([0, 20, 28], dtype=torch.int32),
    },
    "key scores": {"key_scores": torch.randn(1, 2, 20)},
    "key scores, packed": {
        "query": torch.randn(30, 2, 16), "key": torch.randn(30, 2, 16),
        "value": torch.randn(30, 2, 16), "max_seqlen": 20, "key_scores": torch.randn(30, 2),
        "cu_seqlens": torch.tensor([0, 20, 28], dtype=torch.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [name if name != "key scores, packed" else pytest.param(name, marks=pytest.mark.full)
     for name in CHANGES],
)  # fmt: skip
def test_operators_keep_the_rules_of_operators(name):
    torch.library.opcheck(
        operators.forward_operator,
        arguments(**CHANGES[name]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    inputs = arguments(requires_grad=False, **CHANGES[name])
    output, statistics = operators.forward_operator(*inputs)
    backward = (torch.randn_like(output), None, output, statistics, *inputs[:-1])
    there = inputs[4] is not None
    for needs in (
        [True] * 4 + [there],
        [False, False, False, True, False],
        [True, False, True, False, False],
        [False, False, False, False, there],
    ):
        torch.library.opcheck(
            operators.backward_operator,
            (*backward, needs),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"gated": True}], ids=str
)
def test_a_compiled_graph_gives_what_eager_code_gives(options):
    torch.compiler.reset()
    scoring = tisa.TISA(2)
    gated = options.get("gated", False)
    options = {name: x for name, x in options.items() if name != "gated"}

    def run(query, key, value):
        band = scoring.band(query.dtype)
        vector = scoring(query.shape[2])
        more = {"key_scores": key.square().sum(-1).cumsum(-1)} if gated else {}
        return tisa.attention(
            query, key, value, vector, band=band, backend="triton", **options, **more
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = []
    for function in (run, compiled):
        torch.manual_seed(3)
        qkv = [torch.randn(1, 2, 30, 16).requires_grad_() for _ in range(3)]
        out = function(*qkv)
        wanted = [*qkv, *scoring.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_policy_of_checkpointing_sees_the_operator():
    seen = []

    class Looking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    qkv = [torch.randn(1, 2, 10, 16) for _ in range(3)]
    with Looking():
        tisa.attention(*qkv, torch.randn(2, 19), backend="triton")
    assert any("triton_forward" in name for name in seen)


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = tisa.TISA(2)
        self.projection = torch.nn.Linear(32, 96)

    def forward(self, x):
        shape = (*x.shape[:2], 3, 2, 16)
        query, key, value = self.projection(x).view(shape).permute(2, 0, 3, 1, 4).unbind()
        scores, band = self.scores(x.shape[1]), self.scores.band(query.dtype)
        return tisa.attention(query, key, value, scores, band=band, backend="triton")


def sharded(rank, store):
    """In one of two processes: gradients of a sharded module against those of a whole one."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    module = Mixer()
    whole = copy.deepcopy(module)
    x = torch.randn(2, 20, 32)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    module(x[rank : rank + 1]).square().mean().backward()
    (whole(x[:1]).square().mean() + whole(x[1:]).square().mean()).div(2).backward()
    for ours, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
        assert expected.grad.abs().max() > 0
    torch.distributed.destroy_process_group()
    # Gloo's threads outlive their group. One that lets go of a tensor while Python is being taken
    # down ends the process with SIGABRT, so Python is not taken down.
    os._exit(0)


def test_fully_sharded_in_two_processes(tmp_path):
    torch.multiprocessing.spawn(sharded, (tmp_path / "store",), nprocs=2)
