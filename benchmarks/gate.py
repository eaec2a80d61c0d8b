"""Time of attention with gates (the Forgetting Transformer's) on a GPU, beside what else does it.

    PYTHONPATH=. python3 benchmarks/gate.py [--rounds 20] [--out FOLDER]
    TRITON_INTERPRET=1 PYTHONPATH=. python3 benchmarks/gate.py --rehearse

A call is causal attention, forward and backward to query, key, value, to what else is trained, and
to the sums of gates: one float32 number per key and head, `key_scores`. "gates" is that call; the
same name without it is the same call without gates. FlexAttention has the sums as its authors write
them, c[query] − c[key] in a score_mod, compiled, with their gradient if it has one; the limit is
cuDNN's causal attention without gates. Each contender is a captured CUDA graph where it can be
captured, and all take turns in one process.

Nothing is timed that is wrong: output and all gradients of our calls are compared with float64 at
1,024 tokens first (so many that the kernels compared are those that are timed), FlexAttention's
with ours where both are timed.
"""

import argparse
import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from whole_call import HEADS, HERE, RESULTS, Problem, captured, commit_of, fitted, in_turns, seconds

import tisa

SHAPES, CHECKED = [(2048, 8), (8192, 2)], 1024
CUDNN, FLEX, ALONE = "cuDNN, no gates", "FlexAttention", "no scores"
GATES = ", gates"
# Gradients of fitted kernels are small differences of large sums, and say nothing of the code.
FRESH = {
    ALONE: lambda: None,
    "NearFar": lambda: tisa.NearFar(HEADS),
    "TISA": lambda: tisa.TISA(HEADS),
}
MADE: dict[str, Callable[[], torch.nn.Module | None]] = {
    ALONE: lambda: None,
    "NearFar": lambda: tisa.NearFar(HEADS),
    # A pretrained model's kernels: how wide their bands are decides the time.
    "TISA": lambda: fitted()[0],
}


class Gated(Problem):
    """The tensors of one shape, sums of gates among them."""

    def __init__(self, length: int, batch: int, device: str, dtype: torch.dtype) -> None:
        super().__init__(length, batch, 64, True, device, dtype)
        generator = torch.Generator(device).manual_seed(1)
        drawn = torch.randn(batch, HEADS, length, generator=generator, device=device)
        # A token is forgotten after some hundreds of others.
        self.gates = -logsigmoid(drawn + 5).cumsum(-1)
        self.gates.requires_grad_()

    def all_gradients(self, out: torch.Tensor, function, gates: bool) -> list[torch.Tensor]:
        """Return those of query, key, value, of parameters and of the sums of gates."""
        more = [] if function is None else list(function.parameters())
        wanted = [*self.qkv, *more, *([self.gates] if gates else [])]
        return list(torch.autograd.grad(out, wanted, self.upstream.to(out.dtype)))


def ours(problem: Gated, function, gates: bool, backend: str = "triton") -> torch.Tensor:
    more = {"key_scores": problem.gates} if gates else {}
    return tisa.attention(*problem.qkv, function, is_causal=True, backend=backend, **more)


def as_written(problem: Gated, function, dtype: torch.dtype) -> torch.Tensor:
    """Return the call as the paper writes it, with a dense matrix of gates."""
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = (x.to(dtype) for x in problem.qkv)
    logits = (query @ key.mT).to(wide) / query.shape[-1] ** 0.5
    if function is not None:
        logits = logits + function.matrix(problem.length).to(wide)
    gates = problem.gates.to(wide)
    logits = logits - gates[..., :, None] + gates[..., None, :]
    hidden = torch.ones(problem.length, problem.length, dtype=torch.bool, device=query.device)
    return logits.masked_fill(hidden.triu(1), -torch.inf).softmax(-1).to(dtype) @ value


def off(found, wanted) -> float:
    """Return the largest relative difference, to small ones' tenth of the largest."""
    sizes = [float(x.double().norm()) for x in wanted]
    return max(
        float((a.double() - b.double()).norm()) / max(size, 0.1 * max(sizes))
        for a, b, size in zip(found, wanted, sizes, strict=True)
    )


def errors(name: str, problem: Gated) -> tuple[float, float]:
    """Return how far a call with gates is from float64, output and gradients; and eager code."""
    function = FRESH[name]()
    function = None if function is None else function.to(problem.upstream.device)

    def results(out):
        found = [out, *problem.all_gradients(out, function, True)]
        # Each kind among its like: numbers of tokens, the function's parameters, sums of gates.
        return [found[:1], found[1:4], found[-1:], *([found[4:-1]] if function is not None else [])]

    wanted = results(as_written(problem, function, torch.float64))
    ours_, eager = (
        max(off(*pair) for pair in zip(results(out), wanted, strict=True))
        for out in (
            ours(problem, function, True),
            as_written(problem, function, problem.upstream.dtype),
        )
    )
    return ours_, eager


class Flex:
    """FlexAttention with the sums captured; `trained`: whether their gradient comes back."""

    def __init__(self, problem: Gated) -> None:
        self.problem, self.trained = problem, True
        n = problem.length
        self.mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, n, n, device=problem.upstream.device
        )
        self.compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def step(self) -> list[torch.Tensor]:
        """Return the gradients of one call."""
        gates = self.problem.gates if self.trained else self.problem.gates.detach()

        def gated(score, b, h, q, k):
            return score - gates[b, h, q] + gates[b, h, k]

        out = self.compiled(*self.problem.qkv, score_mod=gated, block_mask=self.mask)
        return self.problem.all_gradients(out, None, self.trained)

    def start(self) -> str:
        """Compile; return why there is no gradient of the sums, or nothing."""
        try:
            self.step()
        except Exception as error:  # whatever a version of PyTorch says
            self.trained = False
            self.step()
            return str(error).splitlines()[0][:200]
        return ""


def contenders(problem: Gated, device: str) -> tuple[dict[str, Callable], str]:
    """Return by name what is run, and what is to be said of FlexAttention."""
    runs: dict[str, Callable] = {}

    def limit():
        if device != "cuda":
            out = scaled_dot_product_attention(*problem.qkv, is_causal=True)
        else:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(*problem.qkv, is_causal=True)
        return problem.all_gradients(out, None, False)

    runs[CUDNN] = limit
    for name, make in MADE.items():
        function = make()
        function = None if function is None else function.to(device)
        for gates in (False, True):

            def run(function=function, gates=gates):
                return problem.all_gradients(ours(problem, function, gates), function, gates)

            runs[name + GATES * gates] = run
    said = "not on a CPU"
    if device == "cuda":
        try:
            flex = Flex(problem)
            said = flex.start()
            far = off(flex.step()[:3], runs[ALONE + GATES]()[:3])
            if far > 0.05:
                raise RuntimeError(f"off by {far:.2}")
            runs[FLEX + GATES] = flex.step
            said = said and f"no gradient of the sums: {said}"
        except Exception as error:
            said = f"not timed: {str(error).splitlines()[0][:200]}"
    return runs, said


def measured(problem: Gated, rounds: int, device: str) -> tuple[list[dict], str]:
    """Return one row for each contender of a shape, and what is to be said of FlexAttention."""
    runs, said = contenders(problem, device)
    ready, ways = {}, {}
    for name, run in runs.items():
        run()
        ready[name], ways[name] = (run, 1), "eager"
        if device == "cuda":
            try:
                ready[name], ways[name] = (captured(run), 1), "graph"
            except RuntimeError as error:
                print(f"{name} is not captured: {str(error).splitlines()[0]}", flush=True)
                torch.cuda.synchronize()
    times = in_turns(ready, seconds, rounds, device, 0.01)
    rows = [
        {"length": problem.length, "batch": problem.upstream.shape[0], "contender": name,
         "way": ways[name], "ms": ms, "x cuDNN": ms["p50"] / times[CUDNN]["p50"]}
        for name, ms in times.items()
    ]  # fmt: skip
    for row in rows:
        name = row["contender"].removesuffix(GATES)
        if row["contender"] != name and name in times:
            row["x without gates"] = row["ms"]["p50"] / times[name]["p50"]
    return rows, said


def table(record: dict) -> str:
    """Return the record as Markdown."""
    shapes = list(dict.fromkeys((r["length"], r["batch"]) for r in record["rows"]))
    lines = [
        f"# Attention with gates, {record['date']}", "",
        f"{record['device']}, {record['dtype']}, causal, {HEADS} heads of 64, forward and backward;"
        f" torch {record['torch']}, triton {record['triton']}; commit {record['commit']}. Medians "
        f"of {record['rounds']} rounds in ms (from 20 % to 80 %), × cuDNN without gates, and in "
        "bold × the same call without gates.", "",
        "| | " + " | ".join(f"{n:,} tokens, batch {b}" for n, b in shapes) + " |",
        "|---|" + "---|" * len(shapes),
    ]  # fmt: skip
    for name in dict.fromkeys(row["contender"] for row in record["rows"]):
        cells = []
        for shape in shapes:
            row = next((r for r in record["rows"] if r["contender"] == name and (
                r["length"], r["batch"]) == shape), None)  # fmt: skip
            if row is None:
                cells.append("")
                continue
            ms = row["ms"]
            cell = f"{ms['p50']:.3g} ({ms['p20']:.3g} to {ms['p80']:.3g}), {row['x cuDNN']:.2f} ×"
            if "x without gates" in row:
                cell += f", **{row['x without gates']:.3f} ×**"
            cells.append(cell + (" (eager)" if row["way"] == "eager" else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", f"FlexAttention: {'; '.join(record['flex']) or 'all gradients'}."]
    told = "; ".join(f"{name} {a} ({b})" for name, (a, b) in record["errors"].items())
    lines += ["", f"Largest error against float64 (of eager code): {told}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true", help="little, interpreted, no GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="of a copy that is no checkout")
    args = parser.parse_args()
    device = "cpu" if args.rehearse else "cuda"
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit("it needs a CUDA device; --rehearse goes through it without one")
    dtype = torch.float16 if args.rehearse else torch.bfloat16
    shapes, checked = ([(24, 1)], 40) if args.rehearse else (SHAPES, CHECKED)
    far = {name: errors(name, Gated(checked, 1, device, dtype)) for name in FRESH}
    print("errors against float64, ours and eager code's:", far, flush=True)
    if not all(found <= max(0.02, 3 * eager) for found, eager in far.values()):
        raise SystemExit("that is wrong, and is not timed")
    args.rounds = 1 if args.rehearse else args.rounds
    rows, flex = [], []
    for shape in shapes:
        found, said = measured(Gated(*shape, device, dtype), args.rounds, device)
        rows += found
        flex += [said] if said else []
        for row in found:
            told = f"{row['ms']['p50']:.3f} ms, {row['x cuDNN']:.2f} × cuDNN"
            print(shape, row["contender"], row["way"], told, row.get("x without gates", ""),
                  flush=True)  # fmt: skip
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU" if device == "cpu" else torch.cuda.get_device_name(),
        "dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(),
        "commit": args.commit or commit_of(HERE), "rounds": args.rounds,
        "errors": {name: [float(f"{x:.2g}") for x in pair] for name, pair in far.items()},
        "flex": list(dict.fromkeys(flex)), "rows": rows,
    }  # fmt: skip
    text = table(record)
    print(text)
    if not args.rehearse or args.out != RESULTS:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{record['date']}-gate-gpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
