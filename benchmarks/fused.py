"""Time and memory of attention with a trained score vector on a GPU, beside attention without one.

    PYTHONPATH=. python3 benchmarks/fused.py [--only gate causal wide decode] [--rounds 30]
        [--before benchmarks/results/2026-11-15-fused-gpu.json]

One step is attention and (forward + backward) the gradients of query, key, value and score vector.
Contenders, all in one run, taking turns, so that they meet the same clock:

- PyTorch's attention with **no positions at all**, by FlashAttention and by cuDNN: the limit;
- `triton`, ours, with a band of ±64 and ±256 offsets outside which the score is constant, and
  without a band;
- FlexAttention with the tiles that we found best by hand, PyTorch's attention with a dense bias,
  and the published formulation (a dense bias gathered with an n × n index).

`graph` replays a captured CUDA graph: the time of the kernels. `eager` is what a user's loop waits
for, launches and autograd included. A contender is timed in a case only after its numbers there
have been checked against float64. Needs torch and triton alone.
"""

import argparse
import dataclasses
import json
import math
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tisa

RESULTS = Path(__file__).parent / "results"
FLASH, CUDNN = "flash, no positions", "cuDNN, no positions"
LIMITS = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
BANDS = {"triton, band 64": 64, "triton, band 256": 256, "triton, no band": None}
FLEX, BIAS, AUTHOR = "flex, tuned by hand", "sdpa, dense bias", "author's dense"
CHECKED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one comparison and who takes part."""

    length: int
    batch: int
    contenders: tuple[str, ...]
    heads: int = 12
    dim: int = 64
    is_causal: bool = False
    queries: int | None = None

    def __str__(self) -> str:
        text = f"n = {self.length:,}, batch {self.batch}"
        if self.dim != 64:
            text += f", {self.dim} wide"
        if self.queries is not None:
            text += f", {self.queries} query"
        return text + (", causal" if self.is_causal else "")

    def flop(self, mode: str) -> float:
        """Return the multiplications and additions of the matrix products."""
        pairs = (self.queries or self.length) * self.length * (0.5 if self.is_causal else 1)
        products = 2 if mode == "forward" else 7
        return 2 * products * pairs * self.batch * self.heads * self.dim


OURS = (FLASH, CUDNN, *BANDS)
ALL = (*OURS, FLEX, BIAS, AUTHOR)
SIZES = [(128, 64), (512, 32), (2048, 8), (8192, 2), (32768, 1)]
GROUPS = {
    "gate": [
        Case(n, b, ALL if 512 <= n <= 8192 else (*OURS, BIAS) if n < 512 else OURS)
        for n, b in SIZES
    ],
    "causal": [Case(n, b, OURS, is_causal=True) for n, b in SIZES],
    "wide": [Case(2048, 8, OURS, dim=128), Case(8192, 2, OURS, dim=128)],
    "decode": [
        Case(32768, b, (FLASH, "triton, band 64", "triton, no band"), queries=1) for b in (1, 8)
    ],
}


class Problem:
    """The tensors of a case, the same for every contender."""

    def __init__(self, case: Case, mode: str) -> None:
        self.case, self.training = case, mode != "forward"
        generator = torch.Generator("cuda").manual_seed(0)

        def drawn(length: int) -> torch.Tensor:
            shape = (case.batch, case.heads, length, case.dim)
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        queries = case.queries or case.length
        self.queries = queries
        self.qkv = [drawn(queries), drawn(case.length), drawn(case.length)]
        self.upstream = drawn(queries)
        self.scores = torch.randn(
            case.heads, queries + case.length - 1, generator=generator, device="cuda"
        )
        for leaf in (*self.qkv, self.scores):
            leaf.requires_grad_(self.training)
        self.bands = {
            name: None if width is None
            else torch.tensor([[-width, width]] * case.heads, dtype=torch.int32, device="cuda")
            for name, width in BANDS.items()
        }  # fmt: skip

    @property
    def causal(self) -> bool:
        """Whether keys after the query are hidden."""
        return self.case.is_causal

    def leaves(self, name: str) -> list[torch.Tensor]:
        """Return what a contender is differentiated by."""
        return self.qkv if name in LIMITS else [*self.qkv, self.scores]


def author_dense(problem: Problem) -> torch.Tensor:
    """Return attention as the published code has it: an index, a dense bias, plain attention."""
    query, key, value = problem.qkv
    n = problem.case.length
    places = torch.arange(n, device="cuda")
    index = places[None, :] - places[:, None] + n - 1
    bias = torch.take_along_dim(problem.scores, index.view(1, -1), dim=1).view(-1, n, n)
    logits = query @ key.transpose(-1, -2) / math.sqrt(problem.case.dim) + bias.to(query.dtype)
    return logits.softmax(-1) @ value


def forward(name: str, problem: Problem) -> Callable[[], torch.Tensor]:
    """Return the function that runs a contender's forward pass."""
    if name in LIMITS:

        def limit() -> torch.Tensor:
            with sdpa_kernel(LIMITS[name]):
                return scaled_dot_product_attention(*problem.qkv, is_causal=problem.causal)

        return limit
    if name == AUTHOR:
        return lambda: author_dense(problem)
    backend = {FLEX: "flex", BIAS: "sdpa"}.get(name, "triton")
    return lambda: tisa.attention(
        *problem.qkv, problem.scores, band=problem.bands.get(name), is_causal=problem.causal,
        backend=backend,
    )  # fmt: skip


def step(name: str, problem: Problem) -> Callable[[], object]:
    run = forward(name, problem)
    if not problem.training:
        return run
    leaves = problem.leaves(name)
    return lambda: torch.autograd.grad(run(), leaves, problem.upstream)


def check(name: str, problem: Problem) -> str | None:
    """Return what is wrong with a contender's numbers in this case, or None.

    Some rows alone, in float64, are a small problem; with an upstream gradient of zero everywhere
    else, they decide every gradient of the whole one. The first, the middle and the last ones.
    """
    rows = min(CHECKED_ROWS, problem.queries)
    for first in dict.fromkeys((0, (problem.queries - rows) // 2, problem.queries - rows)):
        wrong = check_rows(name, problem, first, rows)
        if wrong is not None:
            return f"rows from {first}: {wrong}"
    return None


def out_of(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def check_rows(name: str, problem: Problem, first: int, rows: int) -> str | None:
    chosen, keys = slice(first, first + rows), problem.case.length
    upstream = torch.zeros_like(problem.upstream)
    upstream[:, :, chosen] = problem.upstream[:, :, chosen]
    # The part of the score vector that these rows meet.
    start = problem.queries - rows - first
    part = slice(start, start + rows + keys - 1)

    def small(dtype: torch.dtype) -> list[torch.Tensor]:
        query, key, value = (x.detach().to(dtype).requires_grad_() for x in problem.qkv)
        scores = problem.scores.detach().double().requires_grad_()
        out = tisa.attention(
            query[:, :, chosen], key, value,
            None if name in LIMITS else scores[:, part].to(out_of(dtype)),
            band=problem.bands.get(name), is_causal=problem.causal,
            query_start=first + keys - problem.queries, backend="reference",
        )  # fmt: skip
        if not problem.training:
            return [out]
        wanted = [query, key, value, *([] if name in LIMITS else [scores])]
        return [out, *torch.autograd.grad(out, wanted, upstream[:, :, chosen].to(dtype))]

    true, plain = small(torch.float64), small(torch.bfloat16)
    out = forward(name, problem)()
    found = [out[:, :, chosen]]
    if problem.training:
        found += torch.autograd.grad(out, problem.leaves(name), upstream)
    for what, got, want, simple in zip(
        ("output", "query", "key", "value", "scores"), found, true, plain, strict=False
    ):
        # The reference computes in float32; eager code in bfloat16 would be less exact.
        allowed = 2 * (simple.double() - want).abs().max()
        allowed += 16 * torch.finfo(torch.bfloat16).eps * want.abs().max().clamp_min(1e-3)
        error = (got.double() - want).abs().max()
        if not error <= allowed:
            return f"{what}: error {error:.1e}, allowed {allowed:.1e}"
    return None


def captured(run: Callable[[], object], repeats: int = 1) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of so many runs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that one step takes beyond what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, mode: str, rounds: int) -> list[dict]:
    """Return one row for each contender of a case."""
    problem, rows, runs, graphs = Problem(case, mode), [], {}, {}
    torch.compiler.reset()
    for name in case.contenders:
        sizes = {k: v for k, v in dataclasses.asdict(case).items() if k != "contenders"}
        row = {"case": sizes, "label": str(case), "mode": mode, "contender": name}
        rows.append(row)
        try:
            wrong = check(name, problem)
            if wrong is not None:
                row["skipped"] = f"WRONG: {wrong}"
                continue
            row["checked"] = True
            runs[name] = step(name, problem)
            row["peak_bytes"] = peak_bytes(runs[name])
            graphs[name] = captured(runs[name])
        except torch.OutOfMemoryError:
            row["skipped"] = "out of memory"
            runs.pop(name, None)
        except Exception as error:  # a contender that cannot be captured is timed eagerly
            row["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        torch.cuda.empty_cache()
    ways = {"graph": {n: g.replay for n, g in graphs.items()}, "eager": runs}
    for way, contenders in ways.items():
        # Long enough for a loop to be under way: the first steps after a wait are slower.
        repeats = {
            name: max(1, min(50, int(10 / milliseconds(run, 2))))
            for name, run in contenders.items()
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                times[name].append(milliseconds(run, repeats[name]))
        for row in rows:
            if row["contender"] in times:
                found = torch.tensor(times[row["contender"]], dtype=torch.float64)
                levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
                quantiles = found.quantile(levels).tolist()
                row[way] = dict(zip(("p20", "p50", "p80"), quantiles, strict=True))
                row[way]["tflops"] = case.flop(mode) / quantiles[1] * 1e-9
    return rows


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(record: dict) -> str:
    """Return the record as Markdown."""
    lines = [
        f"# Attention with a trained score vector on a GPU, {record['date']}",
        "",
        f"{record['device']}; bfloat16, 12 heads, 64 wide unless said otherwise; "
        f"torch {record['torch']}, triton {record['triton']}, Python {record['python']}; "
        f"commit {record['commit']}; `{record['command']}`.",
        f"Medians of {record['rounds']} interleaved rounds in milliseconds, p20–p80 in brackets. × "
        "is the ratio to cuDNN without positions in the same run (decoding: to FlashAttention). "
        "MiB is the peak of an eager step beyond its inputs. Every number stands behind a check "
        "against float64 of that contender in that case.",
        "",
        "| | | graph, ms | × | TFLOP/s | eager, ms | × | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    labels = dict.fromkeys((row["label"], row["mode"]) for row in record["rows"])
    for label, mode in labels:
        rows = [r for r in record["rows"] if (r["label"], r["mode"]) == (label, mode)]
        limit = next((r for r in rows if r["contender"] == CUDNN), rows[0])
        heading = f"{label}: {mode}"
        for row in rows:
            cells = [heading, row["contender"]]
            heading = ""
            if "skipped" in row:
                cells += [row["skipped"], *[""] * 5]
            else:
                for way in ("graph", "eager"):
                    if way not in row:
                        cells += ["–", "", *([""] if way == "graph" else [])]
                        continue
                    low, middle, high = (short(row[way][q]) for q in ("p20", "p50", "p80"))
                    cells.append(f"{middle} ({low}–{high})")
                    ratio = row[way]["p50"] / limit[way]["p50"] if way in limit else math.nan
                    cells.append(f"{ratio:.2f}")
                    if way == "graph":
                        cells.append(f"{row[way]['tflops']:.0f}")
                cells.append(f"{row['peak_bytes'] / 2**20:,.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compared(record: dict, before: dict) -> str:
    """Return, for each row of both records, by how much it has become slower, limit beside limit.

    A row counts in units of the limit of its own run, so that two days' clocks do not matter.
    """

    def units(of: dict) -> dict[tuple[str, ...], float]:
        kinds: dict[tuple[str, str], list[dict]] = {}
        for row in of["rows"]:
            kinds.setdefault((row["label"], row["mode"]), []).append(row)
        found = {}
        for kind, rows in kinds.items():
            limit = next((r for r in rows if r["contender"] == CUDNN), rows[0])
            for row in rows:
                for way in ("graph", "eager"):
                    if way in row and way in limit:
                        ratio = row[way]["p50"] / limit[way]["p50"]
                        found[(*kind, row["contender"], way)] = ratio
        return found

    now, then = units(record), units(before)
    lines = [f"× of commit {before['commit']}: below 1 is faster", ""]
    lines += [f"{now[k] / then[k]:.3f}  {'; '.join(k)}" for k in now if k in then]
    return "\n".join(lines)


def draw(record: dict, path: Path) -> None:
    """Write a figure: time of a step against the length, relative to no positions at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {
        AUTHOR: ("#8c564b", "D"), BIAS: ("#7f7f7f", "s"), FLEX: ("#e69f00", "^"),
        FLASH: ("#56b4e9", "v"), "triton, no band": ("#cc79a7", "o"),
        "triton, band 256": ("#009e73", "o"), "triton, band 64": ("#d55e00", "o"),
        CUDNN: ("black", ""),
    }  # fmt: skip
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, way in zip(axes, ("graph", "eager"), strict=True):
        rows = [
            r for r in record["rows"]
            if r["mode"] != "forward" and not r["case"]["is_causal"] and r["case"]["dim"] == 64
            and way in r
        ]  # fmt: skip
        limit = {r["case"]["length"]: r[way]["p50"] for r in rows if r["contender"] == CUDNN}
        for name, (colour, marker) in styles.items():
            found = sorted(
                (r["case"]["length"], r[way]["p50"] / limit[r["case"]["length"]])
                for r in rows if r["contender"] == name
            )  # fmt: skip
            if found:
                axis.plot(*zip(*found, strict=True), color=colour, marker=marker, label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens in a sequence")
        lengths = sorted(limit)
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_title("kernels alone (CUDA graph)" if way == "graph" else "as called (eager)")
    axes[0].set_ylabel("time of a training step\n× attention without positions")
    axes[1].legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"Attention with a trained score per offset: {record['device']}, bfloat16, "
        "12 heads of 64, 16,384 tokens (32,768 in the last)", fontsize=10,
    )  # fmt: skip
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of each case")
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--commit", default="unknown", help="what is measured")
    parser.add_argument("--before", type=Path, help="an earlier record, to print ratios to it")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RECORD", "FIGURE"),
                        help="measure nothing, draw a record")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw[0].read_text()), arguments.draw[1])
        return
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": arguments.commit,
        "command": f"python3 benchmarks/fused.py --rounds {arguments.rounds}",
        "rounds": arguments.rounds,
        "rows": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{record['date']}-fused-gpu"
    for group in arguments.only:
        for case in GROUPS[group]:
            kept = tuple(n for n in case.contenders if n not in arguments.without)
            case = dataclasses.replace(case, contenders=kept)
            modes = ("forward",) if group == "decode" else ("forward", "forward + backward")
            for mode in modes:
                print(case, mode, file=sys.stderr, flush=True)
                record["rows"] += measure(case, mode, arguments.rounds)
                stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
                stem.with_suffix(".md").write_text(table(record))
    print(table(record))
    if arguments.before:
        print(compared(record, json.loads(arguments.before.read_text())))
    wrong = [row for row in record["rows"] if row.get("skipped", "").startswith("WRONG")]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(record['rows'])} checks failed")


if __name__ == "__main__":
    main()
