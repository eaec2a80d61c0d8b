r"""What the assembler says of the prototypes' kernels for sm_90, beside the present ones.

PYTHONPATH=.:tests:tests/ops:benchmarks:benchmarks/prototypes \
        python3 benchmarks/prototypes/assembled.py
"""

import json
import sys

import five_products
import smooth_tails
import torch
from compare import FIVES, KEYS

from cross_compile import compiled, planned  # tests/ops
from tisa.ops.triton import problem as problems
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.problem import statistics_shape


def smooth(dim: int, *, causal: bool = False, length: int = 2048):
    """Return the launches of a call with smooth tails."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, key, value, output, grad = (empty(2, 4, length, dim) for _ in range(5))
    scores = empty(4, 2 * length - 1, dtype=torch.float32)
    band = empty(4, 2, dtype=torch.int32)
    plan = smooth_tails.Plan(query, key, value, scores, band, causal=causal, scale=0.125)
    statistics = empty(*statistics_shape(query, None), dtype=torch.float32)
    scratch = empty(sum(plan.sizes()), dtype=torch.float32)
    return [
        *plan.forward(output, statistics),
        *plan.backward(grad, output, statistics, (query, key, value, scores), scratch),
    ]


def five(dim: int, *, band: bool = True, tiles: Tiles | None = None, length: int = 2048):
    """Return the launches of a backward pass of five products."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, key, value, output, grad = (empty(2, 4, length, dim) for _ in range(5))
    scores = empty(4, 2 * length - 1, dtype=torch.float32)
    ends = empty(4, 2, dtype=torch.int32) if band else None
    if tiles is not None:
        five_products.FIVE[dim] = tiles
    plan = five_products.Plan(query, key, value, scores, ends, 0.125)
    statistics = empty(*statistics_shape(query, None), dtype=torch.float32)
    return plan.backward(
        grad, output, statistics, (query, key, value, scores), plan.new_partial(), plan.new_turns()
    )


def main() -> None:
    problems.has_copy_engine = lambda device: True
    for dim in (64, 128):
        calls = {
            "present, band": planned(dim=dim, heads=4, length=2048),
            "present, no band": planned(dim=dim, heads=4, length=2048, band=False),
            "smooth": smooth(dim),
            "smooth, causal": smooth(dim, causal=True),
        }
        for tiles in FIVES[dim].values():
            name = f"five {tiles.block_m} × {tiles.block_n}, {tiles.num_warps} warps"
            calls[name] = five(dim, tiles=tiles)
        for name, (one_loop, tiles) in KEYS.items():
            if dim == 64:
                smooth_tails.ONE_LOOP, smooth_tails.KEY[64] = one_loop, tiles
                calls[f"smooth, {name}"] = smooth(dim)[-2:-1]
        for name, launches in calls.items():
            if len(sys.argv) > 1 and sys.argv[1] not in name:
                continue
            for kernel, _, arguments in launches:
                made, report = compiled(kernel, arguments, 90)
                waits = made.asm["ptx"].count("wgmma.wait_group")
                print(
                    json.dumps({"call": f"{name}, {dim}"} | report | {"waits": waits}), flush=True
                )


if __name__ == "__main__":
    main()
