"""Time of attention with positions as a user writes it: scores, band, attention, all gradients.

    PYTHONPATH=. python3 benchmarks/whole_call.py [--old CHECKOUT] [--rounds 20]
    TRITON_INTERPRET=1 PYTHONPATH=. python3 benchmarks/whole_call.py --rehearse

A call is `tisa.attention(query, key, value, scoring)`, forward and backward to query, key, value
and the parameters of the scoring function. TISA's kernels are those of a pretrained model's six
layers (benchmarks/fitted.py), one call each, the mean counts: how wide bands are decides the time.
T5's band is fixed; the others have none, and what their parameters are makes no difference.
"together" makes the scores and bands of six layers at once, as models do.

- `graph`: a captured CUDA graph, × PyTorch's cuDNN attention without positions in one.
- `eager`: a loop from Python, × a loop of plain `scaled_dot_product_attention`, in no context
  manager (one costs 67 µs), as PyTorch dispatches it.
- `host`: µs that Python takes for a call of 128 tokens, for which the GPU never has to be waited.

All take turns in one process. `--old` measures another checkout too, by the same script in a
process after this one, and the table has both. Nothing is timed if anything is wrong: output and
gradients of every method, freshly drawn, are compared with float64 at 300 tokens first.
"""

import argparse
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
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tisa

HERE = Path(__file__).parent
RESULTS, FITTED = HERE / "results", HERE / "results/fitted-kernels.json"
CUDNN, PLAIN, NO_SCORES = "cuDNN, no positions", "sdpa, no positions", "ours, no positions"
HEADS, LAYERS = 12, 6
MADE: dict[str, Callable[[], torch.nn.Module]] = {
    "T5": lambda: tisa.T5Buckets(HEADS),
    "NearFar": lambda: tisa.NearFar(HEADS),
    "KERPLE": lambda: tisa.KerpleLog(HEADS),
    "TISA v2": lambda: tisa.TISAv2(HEADS),
    "ALiBi": lambda: tisa.ALiBi(HEADS),
}
SHAPES = [
    (512, 32, 64, False), (2048, 8, 64, False), (8192, 2, 64, False), (32768, 1, 64, False),
    (2048, 8, 128, False), (8192, 2, 128, False), (2048, 8, 64, True), (8192, 2, 64, True),
]  # fmt: skip


def fitted() -> list[tisa.TISA]:
    """Return a scoring function for each layer of the model in the record, fitted kernels in it."""
    record = json.loads(FITTED.read_text(encoding="utf-8"))
    functions = []
    for layer in range(LAYERS):
        numbers = {n: torch.tensor(record[n][layer]) for n in (
            "kernel_amplitudes", "kernel_sharpness", "kernel_offsets")}  # fmt: skip
        function = tisa.TISA(*numbers["kernel_offsets"].shape)
        function.load_state_dict(numbers)
        functions.append(function)
    return functions


def methods(device: str) -> dict[str, list[torch.nn.Module]]:
    """Return by name the scoring functions of six layers; in a rehearsal two of few."""
    torch.manual_seed(0)
    every = {"TISA, fitted": fitted()} | {n: [f() for _ in range(LAYERS)] for n, f in MADE.items()}
    if device != "cuda":
        every = {name: functions[:2] for name, functions in list(every.items())[:2]}
    return {name: [f.to(device) for f in functions] for name, functions in every.items()}


class Problem:
    """The tensors of one shape, the same for every contender."""

    def __init__(self, length, batch, dim, causal, device, dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (batch, HEADS, length, dim)
        make = dict(generator=generator, device=device)
        self.qkv = [torch.randn(shape, **make).to(dtype).requires_grad_() for _ in "qkv"]
        self.upstream = torch.randn(shape, **make).to(dtype)
        self.causal, self.length = causal, length

    def gradients(self, out: torch.Tensor, functions=()) -> object:
        """Return the gradients of query, key, value and of the functions' parameters."""
        parameters = [p for f in functions for p in f.parameters()]
        return torch.autograd.grad(out, [*self.qkv, *parameters], self.upstream)


def by_hand(problem: Problem, function, backend: str) -> torch.Tensor:
    """Return the call as it was written before `tisa.attention` took the function."""
    query = problem.qkv[0]
    return tisa.attention(
        *problem.qkv, function(problem.length), band=function.band(query.dtype),
        is_causal=problem.causal, backend=backend,
    )  # fmt: skip


def itself(problem: Problem, function, backend: str) -> torch.Tensor:
    return tisa.attention(*problem.qkv, function, is_causal=problem.causal, backend=backend)


def contenders(problem: Problem, old: bool, backend: str) -> dict[str, tuple[Callable, int]]:
    """Return by name what is run, and how many calls that is."""
    device = problem.upstream.device.type

    def limit(context=None):
        def run():
            if context is None:
                out = scaled_dot_product_attention(*problem.qkv, is_causal=problem.causal)
            else:
                with sdpa_kernel(context):
                    out = scaled_dot_product_attention(*problem.qkv, is_causal=problem.causal)
            return problem.gradients(out)

        return run

    def bare():
        return problem.gradients(
            tisa.attention(*problem.qkv, is_causal=problem.causal, backend="triton")
        )

    runs: dict[str, tuple[Callable, int]] = {PLAIN: (limit(), 1), NO_SCORES: (bare, 1)}
    if device == "cuda":
        runs[CUDNN] = (limit(SDPBackend.CUDNN_ATTENTION), 1)
    call = by_hand if old else itself
    for name, functions in methods(device).items():
        # Bands differ from layer to layer of fitted kernels alone.
        some = functions if name.startswith("TISA,") else functions[:1]

        def apart(some=some):
            for function in some:
                problem.gradients(call(problem, function, backend), [function])

        def together(functions=functions):
            from tisa.scoring import bands_of, scores_of

            outs = [
                tisa.attention(*problem.qkv, vector, band=band, is_causal=problem.causal,
                               backend=backend)
                for vector, band in zip(
                    scores_of(functions, problem.length),
                    bands_of(functions, problem.upstream.dtype), strict=True,
                )
            ]  # fmt: skip
            parameters = [p for f in functions for p in f.parameters()]
            torch.autograd.grad(outs, [*problem.qkv, *parameters], [problem.upstream] * len(outs))

        runs[name] = (apart, len(some))
        if not old:
            runs[f"{name}, together"] = (together, len(functions))
    return runs


def wrong(function, device: str, dtype: torch.dtype, old: bool, backend: str, length: int) -> str:
    """Return what is wrong with a method's output or its parameters' gradients; nothing if none.

    Allowed is three times the error of eager code in the same dtype, or 2 %.
    """
    problem = Problem(length, 2, 64, False, device, dtype)
    parameters = list(function.parameters())

    def results(out):
        upstream = problem.upstream.to(out.dtype)
        more = torch.autograd.grad(out, parameters, upstream) if parameters else ()
        return [x.detach().double() for x in (out, *more)]

    vector = function(length)
    exact = [x.detach().double() for x in problem.qkv]
    wanted = results(tisa.attention(*exact, vector.double(), backend="reference"))
    query, key, value = problem.qkv
    logits = query @ key.mT / query.shape[-1] ** 0.5 + function.matrix(length).to(dtype)
    plain = results(logits.softmax(-1) @ value)
    found = results((by_hand if old else itself)(problem, function, backend))
    for number, (got, want, eager) in enumerate(zip(found, wanted, plain, strict=True)):
        size = want.norm().clamp_min(1e-9)
        off, allowed = float((got - want).norm() / size), float((eager - want).norm() / size)
        if not off <= max(0.02, 3 * allowed):
            what = f"gradient of parameter {number}" if number else "output"
            return f"{what}: off by {off:.2}, eager code by {allowed:.2}"
    return ""


def seconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """Return the GPU's time of a loop, or, where there is none, the processor's."""
    if device != "cuda":
        begun = time.process_time()
        for _ in range(repeats):
            run()
        return (time.process_time() - begun) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


def hosts_seconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """Return the time after which Python goes on; the GPU may still be at work."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begun) / repeats


def captured(run: Callable[[], object]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def in_turns(runs, clock, rounds: int, device: str, aim: float) -> dict[str, dict[str, float]]:
    """Return the milliseconds of one call of each contender: median, 20 % and 80 %, least."""
    repeats = {}
    for name, (run, _) in runs.items():
        clock(run, 1, device)
        repeats[name] = max(1, min(100, int(aim / max(1e-7, clock(run, 1, device)))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, calls) in runs.items():
            times[name].append(1e3 * clock(run, repeats[name], device) / calls)
    levels = torch.tensor([0.2, 0.5, 0.8, 0.0], dtype=torch.float64)
    return {
        name: dict(zip(("p20", "p50", "p80", "least"),
                       torch.tensor(some, dtype=torch.float64).quantile(levels).tolist(),
                       strict=True))
        for name, some in times.items()
    }  # fmt: skip


def measured(shape, args, device, dtype, backend) -> list[dict]:
    """Return one row for each contender of a shape."""
    problem = Problem(*shape, device, dtype)
    runs = contenders(problem, args.as_old, backend)
    ways = {}
    if device == "cuda":
        graphs = {n: (captured(run), calls) for n, (run, calls) in runs.items() if n != PLAIN}
        ways["graph"] = in_turns(graphs, seconds, args.rounds, device, 0.01), CUDNN
    eager = {n: r for n, r in runs.items() if n != CUDNN}
    ways["eager"] = in_turns(eager, seconds, args.rounds, device, 0.01), PLAIN
    keys = ("length", "batch", "dim", "causal")
    return [
        {**dict(zip(keys, shape, strict=True)), "way": way, "contender": name, "ms": ms,
         "x": ms["p50"] / found[limit]["p50"]}
        for way, (found, limit) in ways.items() for name, ms in found.items()
    ]  # fmt: skip


def hosts(args, device, dtype, backend) -> list[dict]:
    """Return what Python takes for a short call."""
    shape = (128 if device == "cuda" else 16, 1, 64, False)
    runs = contenders(Problem(*shape, device, dtype), args.as_old, backend)
    runs.pop(CUDNN, None)
    found = in_turns(runs, hosts_seconds, args.rounds, device, 0.005)
    keys = ("length", "batch", "dim", "causal")
    return [
        {**dict(zip(keys, shape, strict=True)), "way": "host", "contender": name, "ms": ms,
         "x": ms["least"] / found[PLAIN]["least"]}
        for name, ms in found.items()
    ]  # fmt: skip


def table(record: dict) -> str:
    """Return the record as Markdown: × the limit of the way, old → new where both are there."""
    old = {key(row): row for row in record.get("old", [])}
    lines = [
        f"# The whole call, {record['date']}", "",
        f"{record['device']}, {record['dtype']}; torch {record['torch']}, triton "
        f"{record['triton']}; commit {record['commit']}"
        + (f", old {record['old commit']}" if old else "")
        + ". × the limit in the same run (graph: cuDNN without positions; eager and host: plain "
        "SDPA), medians; of the host's time the least, in µs. Old → new.",
        "", "| tokens | way | " + " | ".join(names := list(dict.fromkeys(
            row["contender"] for row in record["rows"]))) + " |",
        "|---|---|" + "---|" * len(names),
    ]  # fmt: skip
    kinds = dict.fromkeys((r["length"], r["dim"], r["causal"], r["way"]) for r in record["rows"])
    for kind in kinds:
        cells = []
        for name in names:
            row = next((r for r in record["rows"] if key(r) == (*kind, name)), None)
            text = "" if row is None else f"{row['x']:.2f}"
            if row is not None and kind[3] == "host":
                text += f" ({1e3 * row['ms']['least']:.0f})"
            before = old.get((*kind, name))
            cells.append(text if before is None else f"{before['x']:.2f} → {text}")
        length, dim, causal, way = kind
        label = f"{length:,}" + f", {dim} wide" * (dim != 64) + ", causal" * causal
        lines.append(f"| {label} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def key(row: dict) -> tuple:
    return row["length"], row["dim"], row["causal"], row["way"], row["contender"]


def other_checkout(checkout: Path, args) -> tuple[list[dict], str]:
    """Return the rows of this script with another checkout's package, and that one's commit."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as-old", "--rounds",
               str(args.rounds), *(["--rehearse"] if args.rehearse else []),
               *(["--lengths", *map(str, args.lengths)] if args.lengths else [])]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    answer = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"--old {checkout}: it must run this script, got {answer.stderr[-800:]}")
    return json.loads(answer.stdout.splitlines()[-1]), commit_of(checkout)


def commit_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    answer = subprocess.run(command, capture_output=True, text=True)
    noted = folder / "commit.txt"  # beside a copy that is no checkout
    return answer.stdout.strip() or (noted.read_text().strip() if noted.exists() else "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="*", help="only these numbers of tokens")
    parser.add_argument("--old", type=Path, help="a checkout of the package to compare with")
    parser.add_argument("--rehearse", action="store_true", help="little, interpreted, no GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of a copy that is no checkout")
    parser.add_argument("--as-old", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cpu" if args.rehearse else "cuda"
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit("it needs a CUDA device; --rehearse goes through it without one")
    dtype = torch.float16 if args.rehearse else torch.bfloat16
    backend, shapes = ("triton", [(24, 1, 64, False)]) if args.rehearse else ("auto", SHAPES)
    shapes = [shape for shape in shapes if not args.lengths or shape[0] in args.lengths]
    args.rounds = 1 if args.rehearse else args.rounds
    if device == "cuda" and not args.as_old:
        from tisa.ops.triton import native

        # What a training loop goes over to after 200 calls.
        native.switch(True)
    # Not fitted ones: kernels that stand hundreds of offsets away have gradients that are small
    # differences of large sums, and say nothing of the code (docs/log.md).
    for name, make in ({"TISA": lambda: tisa.TISA(HEADS)} | MADE).items():
        length = 20 if args.rehearse else 300
        told = wrong(make().to(device), device, dtype, args.as_old, backend, length)
        if told:
            raise SystemExit(f"{name} is wrong, and is not timed: {told}")
    rows = []
    for shape in shapes:
        rows += measured(shape, args, device, dtype, backend)
        if not args.as_old:
            print(shape, {r["contender"]: round(r["x"], 2) for r in rows if key(r)[:3] == (
                shape[0], shape[2], shape[3])}, flush=True)  # fmt: skip
    rows += hosts(args, device, dtype, backend)
    if args.as_old:
        print(json.dumps(rows))
        return
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU" if device == "cpu" else torch.cuda.get_device_name(),
        "dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(),
        "commit": args.commit or commit_of(HERE), "rounds": args.rounds,
        "kernels": json.loads(FITTED.read_text(encoding="utf-8"))["model"], "rows": rows,
    }  # fmt: skip
    path = args.out / f"{record['date']}-whole-call-gpu.json"
    for old in [None, args.old] if args.old else [None]:
        if old:
            record["old"], record["old commit"] = other_checkout(old, args)
        bad = [r for r in rows if not math.isfinite(r["x"])]
        assert not bad, bad
        text = table(record)
        # Before the other checkout's turn too: that one may fail.
        if not args.rehearse:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
