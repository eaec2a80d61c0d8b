"""How large the tiles of the fused kernels should be: each kernel alone, replayed as a CUDA graph.

    PYTHONPATH=. python3 benchmarks/tiles.py [--out FOLDER] [--only NAME …]

Candidates of one kernel and case are replayed in turn, so that all meet the same clock. Beside them
stand the kernels that ship and PyTorch's attention without positions (forward; forward + backward).
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from fused import captured
from torch.nn.attention import SDPBackend, sdpa_kernel

from tisa.ops.triton import configs, plan, plan_backward
from tisa.ops.triton import problem as problems
from tisa.ops.triton.configs import Tiles
from tisa.ops.triton.plan_backward import Gradients, Upstream
from tisa.ops.triton.problem import Inputs, Problem, statistics_shape

RESULTS = Path(__file__).parent / "results"
ROUNDS, REPEATS = 15, 4


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Return the median milliseconds of one run in each graph."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / REPEATS)
    return {name: torch.tensor(found).median().item() for name, found in times.items()}


class Case:
    """Tensors of one size; the score vector is constant beyond `band`."""

    def __init__(self, length: int, batch: int, band: int | None, *, causal=False, dim=64) -> None:
        self.name = f"n={length} b={batch} d={dim} band={band}{' causal' if causal else ''}"
        heads, self.causal = 12, causal
        torch.manual_seed(0)

        def drawn() -> torch.Tensor:
            return torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)

        self.query, self.key, self.value, self.grad = (drawn() for _ in range(4))
        self.scores = torch.randn(heads, 2 * length - 1, device="cuda")
        self.band = None
        if band is not None:
            self.band = torch.tensor([[-band, band]] * heads, dtype=torch.int32, device="cuda")
        self.output = torch.empty_like(self.query)
        shape = statistics_shape(self.query, None)
        self.statistics = torch.empty(shape, device="cuda")
        self.delta = torch.empty_like(self.statistics[0])
        self.gradients = [torch.empty_like(x) for x in (self.query, self.key, self.value)]
        self.scores_gradient = torch.empty_like(self.scores)
        self.sums = torch.empty(2**27, device="cuda")
        self.sides = torch.zeros(2**12, device="cuda")

    def launches(self, kernel: str) -> list[plan.Launch]:
        """Return the plan of one kernel."""
        problem = Problem(Inputs(
            self.query, self.key, self.value, self.scores, None, self.band, None, None, None, None,
            0, 0, None, 0 if self.causal else None, self.query.shape[-1] ** -0.5, 0.0,
        ))  # fmt: skip
        upstream = Upstream(self.grad, None, self.output, self.statistics)
        trained = Gradients(*self.gradients, self.scores_gradient)
        if kernel == "forward":
            return plan.forward(problem, self.output, self.statistics)
        if kernel == "key":
            return [plan_backward._key(problem, upstream, self.delta, *self.gradients[1:])]
        if kernel == "small":
            return plan_backward._small(problem, upstream, trained, self.sums)
        if kernel == "query":
            frozen = trained._replace(scores=None)
            arguments = (problem, upstream, self.delta, frozen, self.sums, self.sides)
            return [plan_backward._query(*arguments)]
        query = plan_backward._query(problem, upstream, self.delta, trained, self.sums, self.sides)
        if kernel == "query":
            return [query]
        return [query, plan_backward._entries(
            problem, problem.tiles.trained.block_m, self.sums, self.sides, self.scores_gradient,
            plan_backward._query_programs(problem, True),
        )]  # fmt: skip

    def runner(self, kernel: str) -> Callable[[], object]:
        """Return what launches one kernel."""
        planned = self.launches(kernel)
        return lambda: [k[(programs,)](**arguments) for k, programs, arguments in planned]

    def limits(self) -> dict[str, torch.cuda.CUDAGraph]:
        """Return graphs of PyTorch's attention without positions."""
        graphs = {}
        leaves = [x.detach().requires_grad_() for x in (self.query, self.key, self.value)]
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):  # fmt: skip

            def forward(backend=backend):
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(
                        *leaves, is_causal=self.causal
                    )

            def both(forward=forward):
                return torch.autograd.grad(forward(), leaves, self.grad)

            graphs[f"{name} forward"] = captured(forward, REPEATS)
            graphs[f"{name} both"] = captured(both, REPEATS)
        return graphs


def with_tiles(kernel: str, tiles: Tiles | None) -> Callable[..., configs.Config]:
    def chosen(*sizes: int, **kinds: bool) -> configs.Config:
        shipped = configs.config(*sizes, **kinds)
        if tiles is None:
            return shipped
        return dataclasses.replace(shipped, **{kernel: tiles})

    return chosen


def label(tiles: Tiles | None) -> str:
    if tiles is None:
        return "shipped"
    text = f"{tiles.block_m}×{tiles.block_n} w{tiles.num_warps} s{tiles.num_stages}"
    return text + (f" r{tiles.maxnreg}" if tiles.maxnreg else "")


def sweep(case: Case, kernel: str, candidates: list[Tiles]) -> dict[str, float | str]:
    """Return milliseconds of a kernel for each choice of tiles."""
    graphs, found = {}, {}
    for tiles in (None, *candidates):
        if kernel == "small":
            plan_backward.SMALL = (
                configs.SMALL if tiles is None else dict.fromkeys((64, 128), tiles)
            )
        else:
            problems.config = with_tiles(kernel.partition(",")[0], tiles)
        try:
            graphs[label(tiles)] = captured(case.runner(kernel), REPEATS)
        except Exception as error:
            found[label(tiles)] = f"{type(error).__name__}: {str(error)[:80]}"
            torch.cuda.synchronize()
        finally:
            problems.config, plan_backward.SMALL = configs.config, configs.SMALL
    return interleaved(graphs) | found


# What a round of tuning compares; edit, run, write down in docs/log.md what came out.
CANDIDATES = {
    64: {"forward": [], "trained": [], "key": [], "small": []},
    128: {
        "forward": [
            Tiles(128, 128, 8, 2), Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3),
            Tiles(128, 64, 8, 2),
        ],
        "trained": [
            Tiles(64, 64, 4, 2, resident=2), Tiles(64, 64, 8, 2, resident=1),
            Tiles(64, 64, 8, 3, resident=1),
        ],
        "key": [
            Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 3), Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2),
            Tiles(32, 128, 8, 3), Tiles(64, 128, 8, 1),
        ],
    },
}  # fmt: skip
CASES = [
    (128, 64, 64, {}), (128, 64, None, {}), (512, 32, 64, {}), (2048, 8, 64, {"dim": 128}),
    (8192, 2, 64, {"dim": 128}),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", help="kernels to sweep")
    arguments = parser.parse_args()
    record = {
        "date": datetime.now(UTC).date().isoformat(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "cases": {},
    }  # fmt: skip
    for length, batch, band, more in CASES:
        case = Case(length, batch, band, **more)
        begin = time.perf_counter()
        found = {"limits": interleaved(case.limits())}
        for kernel, candidates in CANDIDATES[case.query.shape[-1]].items():
            if kernel == "small" and length > 128:
                continue
            if arguments.only and kernel not in arguments.only:
                case.runner(kernel)()
                continue
            found[kernel] = sweep(case, kernel, candidates)
        record["cases"][case.name] = found
        print(case.name, f"({time.perf_counter() - begin:.0f} s)")
        for kernel, times in found.items():
            cells = [
                f"{k} {v if isinstance(v, str) else format(v, '.4f')}" for k, v in times.items()
            ]
            print(f"  {kernel}: " + "; ".join(cells), flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{record['date']}-tiles.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
