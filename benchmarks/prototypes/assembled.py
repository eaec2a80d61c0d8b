r"""What the assembler says of the prototypes' kernels for sm_90, beside the present ones.

PYTHONPATH=.:tests:tests/ops:benchmarks:benchmarks/prototypes \
        python3 benchmarks/prototypes/assembled.py
"""

import json
import sys

import smooth_tails
import torch
from compare import KEYS

from cross_compile import compiled, planned  # tests/ops
from tisa.ops.triton import problem as problems
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


def main() -> None:
    problems.has_copy_engine = lambda device: True
    for dim in (64, 128):
        calls = {
            "present, band": planned(dim=dim, heads=4, length=2048),
            "present, no band": planned(dim=dim, heads=4, length=2048, band=False),
            "smooth": smooth(dim),
            "smooth, causal": smooth(dim, causal=True),
        }
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
