"""Launch by Triton's own means and as they are remembered, and compare: for test_launch.py.

Prints one line for each comparison that holds; stops at the first that does not.
"""

import functools
import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stubbed import STREAM, stubbed
from tisa.ops.triton import launching
from tisa.ops.triton.arguments import Strided
from tisa.ops.triton.plan import Launch


@triton.jit(do_not_specialize=["rows"])
def every_kind(described, group, pointer, absent, scale, rows, one, COUNT: tl.constexpr):
    """Take an argument of every kind that the kernels of this package have."""
    tile = described.load([0, 0]).to(tl.float32) * scale + rows + one
    at = tl.arange(0, 16)[:, None] * group.row + tl.arange(0, 16)[None, :]
    tl.store(group.pointer + at, tile)
    tl.store(pointer + at, tile * COUNT)


SIZES = [128, 4, 4, 8, 8, 8, 4, 4, 4, 8, 4, 4, 8, 8]


def launch_every_kind(tensors, cluster, pdl):
    """Return the plan for these tensors."""
    source, target, third = tensors
    arguments = dict(
        described=TensorDescriptor(source, [64, 16], [16, 1], [16, 16]),
        group=Strided(target, 1024, 1024, 16),
        pointer=third[64:],
        absent=None,
        scale=0.1,
        rows=5,
        one=1,
        COUNT=3,
        num_warps=2,
        num_ctas=cluster,
        launch_pdl=pdl,
    )
    return [Launch(every_kind, 6, arguments)]


def compare(noted, cluster, pdl):
    """Launch for two groups of tensors by both ways."""
    known = launching.known((torch.empty(0),), cluster, pdl)
    device = torch.device("cpu")
    for _ in range(3):
        tensors = [torch.randn(1024 + 64) for _ in range(3)]
        noted.launches.clear()
        plan = launch_every_kind(tensors, cluster, pdl)
        for kernel, programs, arguments in plan:
            kernel[(programs,)](**arguments)
        for _ in range(2):
            again = functools.partial(launch_every_kind, tensors, cluster, pdl)
            launching.launch(known, "what", tensors[:1], tensors[1:], again, device)
        triton_s, *ours = noted.launches
        assert triton_s.sizes[0] == 6 * cluster
        assert triton_s.stream == STREAM
        assert len(ours) == 2
        # A descriptor, its two sizes and strides; three numbers of the group beside its pointer;
        # `one` is known to the compiler; two addresses of scratch memory end every kernel.
        assert [len(x) for x in triton_s.parameters] == SIZES
        assert all(launch == triton_s for launch in ours), (triton_s, ours)
        assert not launching.long_way, launching.long_way
    (templates,) = known.templates.values()
    assert len(templates) == 1
    print(f"the same launch: {cluster} blocks in a cluster, dependent: {pdl}")


if __name__ == "__main__":
    with stubbed() as noted:
        for cluster, pdl in ((1, False), (2, True)):
            compare(noted, cluster, pdl)
    sys.exit(0)
