"""Time and memory of every attention backend with trained scores, beside attention without them.

    PYTHONPATH=.:lab python3 benchmarks/attention.py [--device cuda] [--quick]

One step is: scores from a TISA's parameters, attention, and (forward + backward) the gradients of
query, key, value and of those parameters. Contenders:

- `sdpa, no positions`: PyTorch's own attention with no scores at all, the limit;
- `author's dense`: the published formulation, a dense bias gathered with an n × n index;
- our backends by name.

A contender runs in a case only after its numbers there have been checked against float64. Rounds
are interleaved, so that all contenders meet the same moods of the machine; only ratios within one
run mean anything. Needs torch alone.

On a GPU, `benchmarks/fused.py` compares what trains a score vector there, kernel by kernel.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

import tisa
from tisa_lab.record import commit

RESULTS = Path(__file__).parent / "results"
LIMIT = "sdpa, no positions"
DENSE = "author's dense"
BACKENDS = ("reference", "chunked", "sdpa", "flex")
CONTENDERS = (LIMIT, DENSE, *BACKENDS)
CHECKED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one comparison."""

    length: int
    batch: int
    heads: int = 12
    dim: int = 64
    is_causal: bool = False

    def __str__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        size = "" if (self.heads, self.dim) == (12, 64) else f", {self.heads} × {self.dim}"
        return f"n = {self.length:,}, batch {self.batch}{size}{causal}"


CPU_CASES = [
    Case(128, 8),
    Case(512, 4),
    Case(1024, 1),
    Case(2048, 1),
    Case(2048, 1, is_causal=True),
    Case(4096, 1),
]
GPU_CASES = [
    Case(128, 64),
    Case(512, 32),
    Case(2048, 8),
    Case(2048, 8, is_causal=True),
    Case(8192, 2),
    Case(32768, 1),
]
QUICK_CASES = [Case(96, 1, heads=4, dim=16), Case(130, 2, heads=4, dim=16, is_causal=True)]


class Problem:
    """The tensors of a case, the same for every contender."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, case.heads, case.length, case.dim)
        self.qkv = [
            torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
            for _ in range(3)
        ]
        self.upstream = torch.randn(shape, generator=generator).to(device, dtype)
        torch.manual_seed(1)
        self.scoring = tisa.TISA(case.heads).to(device)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All that is trained."""
        return [*self.qkv, *self.scoring.parameters()]

    def without_gradients(self) -> None:
        """Make it inference."""
        for leaf in self.leaves:
            leaf.requires_grad_(False)


def author_dense(problem: Problem) -> torch.Tensor:
    """Return attention as the published code has it, in the paper's convention.

    The kernels at 2n + 1 offsets, an n × n index made in each call, a dense bias gathered with it,
    and plain attention. (The published code makes the index on the CPU, wherever the model is.)
    """
    query, key, value = problem.qkv
    n = problem.case.length
    scores = problem.scoring.scores(torch.arange(-n, n + 1, device=problem.device))
    places = torch.arange(n, device=problem.device)
    index = places[None, :] - places[:, None] + n
    bias = torch.take_along_dim(scores, index.view(1, -1), dim=1).view(-1, n, n)
    logits = query @ key.transpose(-1, -2) / math.sqrt(problem.case.dim) + bias.to(query.dtype)
    if problem.case.is_causal:
        logits = logits.masked_fill(index > n, -torch.inf)
    return logits.softmax(-1) @ value


def contender(name: str, problem: Problem) -> Callable[[], torch.Tensor]:
    """Return the function that runs one forward pass."""
    case, causal = problem.case, problem.case.is_causal
    if name == LIMIT:
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            *problem.qkv, is_causal=causal
        )
    if name == DENSE:
        return lambda: author_dense(problem)
    return lambda: tisa.attention(
        *problem.qkv, problem.scoring(case.length), is_causal=causal, backend=name
    )


def backward(problem: Problem, output: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    leaves = [leaf for leaf in problem.leaves if leaf.requires_grad]
    return list(torch.autograd.grad(output, leaves, upstream, allow_unused=True))


def dense_bytes(name: str, case: Case, dtype: torch.dtype, *, training: bool) -> int:
    """Return a rough lower bound of what a contender that writes n × n needs."""
    matrix = case.length**2 * case.heads
    if name in (DENSE, "reference", "sdpa"):
        width = 4 if name == "reference" else torch.finfo(dtype).bits // 8
        return width * matrix * case.batch * (4 if training else 2)
    return 0


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)


def check(name: str, problem: Problem) -> str | None:
    """Return what is wrong with a contender's numbers in this case, or None.

    Some rows alone, in float64, are a small problem; with an upstream gradient of zero everywhere
    else, they decide every gradient of the whole one. The first, the middle and the last ones.
    """
    length, rows = problem.case.length, min(CHECKED_ROWS, problem.case.length)
    for first in dict.fromkeys((0, (length - rows) // 2, length - rows)):
        wrong = check_rows(name, problem, first, rows)
        if wrong is not None:
            return f"rows from {first}: {wrong}"
    return None


def check_rows(name: str, problem: Problem, first: int, rows: int) -> str | None:
    case, chosen = problem.case, slice(first, first + rows)
    training = problem.qkv[0].requires_grad
    positions = name != LIMIT

    def small(dtype: torch.dtype, formula: Callable) -> list[torch.Tensor]:
        scoring = tisa.TISA(case.heads).to(problem.device)
        scoring.load_state_dict(problem.scoring.state_dict())
        if dtype == torch.float64:
            scoring.double()
        leaves = [x.detach().to(dtype).requires_grad_() for x in problem.qkv]
        vector = scoring(rows, case.length, query_start=first) if positions else None
        out = formula(leaves[0][:, :, chosen], leaves[1], leaves[2], vector)
        if not training:
            return [out]
        wanted = [*leaves, *(scoring.parameters() if positions else ())]
        return [out, *torch.autograd.grad(out, wanted, upstream[:, :, chosen].to(dtype))]

    def exact(query, key, value, vector):
        return tisa.attention(
            query, key, value, vector, query_start=first, is_causal=case.is_causal,
            backend="reference",
        )  # fmt: skip

    def eager(query, key, value, vector):
        logits = query @ key.transpose(-1, -2) / math.sqrt(case.dim)
        if vector is not None:
            matrix = tisa.offsets.to_matrix(vector, rows, case.length)
            logits = logits + matrix.to(query.dtype)
        if case.is_causal:
            seen = torch.ones(rows, case.length, dtype=torch.bool, device=query.device)
            logits = logits.masked_fill(~seen.tril(first), -torch.inf)
        return logits.softmax(-1) @ value

    upstream = torch.zeros_like(problem.upstream)
    upstream[:, :, chosen] = problem.upstream[:, :, chosen]
    true, plain = small(torch.float64, exact), small(problem.dtype, eager)
    out = contender(name, problem)()
    found = [out[:, :, chosen]]
    if training:
        gradients = backward(problem, out, upstream)
        found += gradients if positions else gradients[:3]
    names = ["output", "query", "key", "value", "amplitudes", "sharpness", "offsets"]
    for what, got, want, simple in zip(names, found, true, plain, strict=False):
        scale = want.abs().max().clamp_min(1e-3)
        allowed = 2 * (simple.double() - want).abs().max()
        allowed += 16 * torch.finfo(problem.dtype).eps * scale
        error = (got.double() - want).abs().max()
        if not error <= allowed:
            return f"{what}: error {error:.1e}, allowed {allowed:.1e}"
    return None


def step(name: str, problem: Problem) -> Callable[[], None]:
    run = contender(name, problem)

    def once() -> None:
        output = run()
        if problem.qkv[0].requires_grad:
            backward(problem, output, problem.upstream)

    return once


def milliseconds(function: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start_time = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start_time)


def peak_bytes(function: Callable[[], None], device: torch.device) -> int:
    """Return the most memory that one call takes beyond what was there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # In a process of its own (see `cpu_peak`), so that the high-water mark is this call's.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return this process's resident memory, present (VmRSS) or highest so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def cpu_peak(name: str, case: Case, *, training: bool) -> int | None:
    """Return `peak_bytes` measured in a fresh process; None where there is no Linux to ask."""
    if sys.platform != "linux":
        return None
    request = json.dumps({"name": name, "case": dataclasses.asdict(case), "training": training})
    answer = subprocess.run(
        [sys.executable, __file__, "--memory-of", request],
        capture_output=True, text=True, check=True,
        # Every larger tensor is mapped and unmapped: what is freed is not resident any more.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    return int(answer.stdout)


def answer_memory(request: str) -> None:
    asked = json.loads(request)
    device = torch.device("cpu")
    # Load the libraries' own working memory before the mark is read.
    warm = Problem(QUICK_CASES[0], device, torch.float32)
    if not asked["training"]:
        warm.without_gradients()
    step(asked["name"], warm)()
    problem = Problem(Case(**asked["case"]), device, torch.float32)
    if not asked["training"]:
        problem.without_gradients()
    once = step(asked["name"], problem)
    if asked["name"] == "flex":
        once()  # compiles for this size, which is not to be counted
    print(peak_bytes(once, device))


def measure(case: Case, device: torch.device, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Return one row for each contender and mode of a case."""
    rows = []
    for mode in ("forward", "forward + backward"):
        training = mode != "forward"
        problem = Problem(case, device, dtype)
        if not training:
            problem.without_gradients()
        torch.compiler.reset()  # FlexAttention is compiled for each case, as for a user's one size
        steps, times = {}, {}
        for name in CONTENDERS:
            row = {"case": dataclasses.asdict(case), "mode": mode, "contender": name}
            rows.append(row)
            needed = dense_bytes(name, case, dtype, training=training)
            if needed > 0.6 * free_bytes(device):
                row["skipped"] = f"needs about {needed / 2**30:.0f} GiB"
                continue
            try:
                wrong = check(name, problem)
            except torch.OutOfMemoryError:
                row["skipped"] = "out of memory"
                continue
            except ValueError as error:
                reason = str(error).partition("cannot do this call: ")[2].partition(";")[0]
                if not reason:
                    raise
                row["skipped"] = reason
                continue
            if wrong is not None:
                row["skipped"] = f"WRONG: {wrong}"
                continue
            row["checked"] = True
            steps[name], times[name] = step(name, problem), []
        for _ in range(2):
            for once in steps.values():
                once()
        for _ in range(rounds):
            for name, once in steps.items():
                times[name].append(milliseconds(once, device))
        for row in rows:
            name = row["contender"]
            if row["mode"] != mode or name not in steps:
                continue
            quantiles = torch.tensor(times[name]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
            row["ms"] = dict(zip(("p20", "p50", "p80"), quantiles, strict=True))
            row["peak_bytes"] = (
                peak_bytes(steps[name], device)
                if device.type == "cuda"
                else cpu_peak(name, case, training=training)
            )
        print(f"  {mode}: done", file=sys.stderr)
    return rows


def table(record: dict) -> str:
    """Return the record as Markdown: one table."""
    lines = [
        f"# Attention with trained scores, {record['date']}",
        "",
        f"{record['device']}; {record['dtype']}, 12 heads, 64 wide unless said otherwise; "
        f"torch {record['torch']}, Python {record['python']}; commit {record['commit']}; "
        f"`{record['command']}`.",
        f"Medians of {record['rounds']} interleaved rounds, p20–p80 in brackets; × is the ratio to "
        "PyTorch's attention without any positions in the same run; MiB is the peak beyond the "
        "inputs. Each number stands behind a check against float64 of that contender in that case.",
        "",
        "| | | forward, ms | × | MiB | forward + backward, ms | × | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cases = [Case(**row["case"]) for row in record["rows"]]
    for case in dict.fromkeys(cases):
        label = str(case)
        for name in dict.fromkeys(row["contender"] for row in record["rows"]):
            cells = [label, name]
            label = ""
            for mode in ("forward", "forward + backward"):
                rows = {
                    row["contender"]: row
                    for row, of in zip(record["rows"], cases, strict=True)
                    if of == case and row["mode"] == mode
                }
                row = rows[name]
                if "ms" not in row:
                    cells += [row["skipped"], "", ""]
                    continue
                low, middle, high = (short(row["ms"][q]) for q in ("p20", "p50", "p80"))
                limit = rows[LIMIT]["ms"]["p50"]
                peak = row["peak_bytes"]
                cells += [
                    f"{middle} ({low}–{high})",
                    f"{row['ms']['p50'] / limit:.2f}",
                    "" if peak is None else f"{peak / 2**20:,.0f}",
                ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--rounds", type=int, default=None, help="timed rounds of each case")
    parser.add_argument("--quick", action="store_true", help="two tiny cases, to try the script")
    parser.add_argument("--commit", help="what is measured, where git is not there to say")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of is not None:
        answer_memory(arguments.memory_of)
        return

    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    cases = QUICK_CASES if arguments.quick else GPU_CASES if on_gpu else CPU_CASES
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rounds = arguments.rounds or (3 if arguments.quick else 50 if on_gpu else 7)
    now = datetime.now(UTC)
    record = {
        "date": now.date().isoformat(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.machine(),
        "commit": arguments.commit or commit(),
        "command": " ".join(
            ["python3 benchmarks/attention.py", f"--device {device.type}", f"--rounds {rounds}"]
            + ["--quick"] * arguments.quick
        ),
        "rounds": rounds,
        "rows": [],
    }
    for case in cases:
        print(case, file=sys.stderr)
        record["rows"] += measure(case, device, dtype, rounds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{record['date']}-attention-{'gpu' if on_gpu else 'cpu'}"
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(record))
    print(table(record))
    wrong = [row for row in record["rows"] if row.get("skipped", "").startswith("WRONG")]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(record['rows'])} checks failed")


if __name__ == "__main__":
    main()
