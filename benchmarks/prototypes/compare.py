r"""The prototypes on a GPU: right against float64 first, then timed beside what there is.

    PYTHONPATH=.:benchmarks:benchmarks/prototypes:tests python3 \
        benchmarks/prototypes/compare.py [--out FOLDER] [--widths 64] [--quick]

Curves without a band (NearFar, KERPLE) with parabolas in place of their tails, beside the
present kernels without a band, and with the narrow band of a curve that is constant far away, which
is what smooth tails should cost; beside cuDNN without positions.

One step is forward + backward with the gradient of the score vector, replayed as a CUDA graph, in
turns; milliseconds are medians, × is against cuDNN. What is wrong is not timed. Under
TRITON_INTERPRET=1 only the check runs, small, in float16.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import smooth_tails
import torch
import triton
from fused import captured
from torch.nn.attention import SDPBackend, sdpa_kernel

import tisa
from budget import eager
from tisa.offsets import to_matrix
from tisa.ops.triton import interpreted
from tisa.ops.triton.configs import Tiles
from tisa.scoring import ScoringFunction

HEADS, ROUNDS, REPEATS = 12, 11, 2
SIZES = {512: 32, 2048: 8, 8192: 2, 32768: 1}
KEYS = {
    "one loop, 168": (True, Tiles(64, 64, 4, 3, maxnreg=168)),
    "one loop, one stage": (True, Tiles(64, 64, 4, 1, maxnreg=168)),
    "two loops, 168": (False, Tiles(64, 64, 4, 3, maxnreg=168)),
    "two loops, 200": (False, Tiles(64, 64, 4, 3)),
}
FORWARDS = {
    "128 keys": Tiles(64, 128, 4, 2), "64 keys": Tiles(64, 64, 4, 2),
    "64 keys, 3 stages": Tiles(64, 64, 4, 3),
}  # fmt: skip


@dataclass
class Case:
    """Tensors of one size, and what takes part: a function of the inputs for each contender."""

    qkv: list[torch.Tensor]
    grad: torch.Tensor
    scores: torch.Tensor
    causal: bool
    runs: dict[str, Callable[..., torch.Tensor]]
    # With one, the gradient of the scores is compared as that of its parameters.
    scoring: ScoringFunction | None = None

    def of_parameters(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients with those of the parameters in place of the score vector's.

        Parabolas give back the latter at other offsets than it arose at.
        """
        if self.scoring is None or len(found) < 5:
            return found
        scoring = copy.deepcopy(self.scoring).double()
        vector = scoring(self.grad.shape[2])
        upstream = found[4].to(vector.dtype)
        return [*found[:4], *torch.autograd.grad(vector, list(scoring.parameters()), upstream)]


def curve(kind: str, dtype: torch.dtype, device: str) -> tuple[ScoringFunction, torch.Tensor]:
    """Return a scoring function at step 0 and the band outside which it is smooth."""
    torch.manual_seed(0)
    scoring = (tisa.NearFar if kind == "near far" else tisa.KerpleLog)(HEADS).to(device)
    band = smooth_tails.band_for(scoring, dtype)
    assert band is not None
    return scoring, band


def drawn(length: int, batch: int, dim: int, dtype: torch.dtype, device: str) -> list:
    """Return query, key, value and a gradient that comes back."""
    torch.manual_seed(1)
    shape = (batch, HEADS, length, dim)
    return [torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for _ in range(4)]


def cudnn(query, key, value, causal: bool) -> torch.Tensor:
    """Return attention without positions."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def present(band: torch.Tensor | None, causal: bool) -> Callable[..., torch.Tensor]:
    """Return the present kernels."""

    def run(query, key, value, scores=None):
        return tisa.attention(
            query, key, value, scores, band=None if scores is None else band, is_causal=causal,
            backend="triton",
        )  # fmt: skip

    return run


def with_tiles(module: Any, changes: dict[str, Any], run: Callable) -> Callable:
    """Return a run for which a prototype's module has other numbers, forward and backward.

    Plans are made in the forward pass and kept for the backward pass.
    """

    def changed(*inputs: torch.Tensor) -> torch.Tensor:
        before = {name: getattr(module, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(module, name, value)
            return run(*inputs)
        finally:
            for name, value in before.items():
                setattr(module, name, value)

    return changed


def smooth_runs(
    dim: int, band: torch.Tensor, causal: bool, chosen: tuple[str, str] | None
) -> dict[str, Callable]:
    """Return the variants of smooth tails by name; or the one with this key and forward kernel."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return smooth_tails.attention(*inputs, band, causal=causal)

    def variant(key: str, forward: str) -> Callable:
        one_loop, tiles = KEYS[key]
        changes = {
            "ONE_LOOP": one_loop, "KEY": smooth_tails.KEY | {64: tiles},
            "FORWARD": smooth_tails.FORWARD | {64: FORWARDS[forward]},
        }  # fmt: skip
        return with_tiles(smooth_tails, changes, run)

    if dim != 64:
        return {"smooth": run}
    if chosen is not None:
        return {"smooth": variant(*chosen)}
    first_key, first_forward = next(iter(KEYS)), next(iter(FORWARDS))
    keys = {f"smooth, key: {name}": variant(name, first_forward) for name in KEYS}
    forwards = {f"smooth, forward: {name}": variant(first_key, name) for name in FORWARDS}
    return keys | forwards


def fastest(times: dict[str, float]) -> tuple[str, str] | None:
    """Return the best key kernel, by the step, and the best forward kernel, by itself."""
    keys = {n: t for name in KEYS for n, t in [(name, times.get(f"smooth, key: {name}"))] if t}
    forwards = {
        n: t
        for name in FORWARDS
        for n, t in [(name, times.get(f"smooth, forward: {name} | forward"))]
        if t
    }
    if not keys or not forwards:
        return None
    return min(keys, key=keys.__getitem__), min(forwards, key=forwards.__getitem__)


def gradients(run: Callable, case: Case, *, scores: bool = True) -> list[torch.Tensor]:
    """Return the output and every gradient."""
    leaves = [x.detach().requires_grad_() for x in (*case.qkv, *([case.scores] if scores else []))]
    out = run(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, case.grad.to(out.dtype))]
    return case.of_parameters(found)


def exactly(case: Case, band: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what is right, head by head, in float64; or in another dtype, as people write it."""
    found = []
    n = case.grad.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=case.grad.device).tril()
    for head in range(HEADS):
        leaves = [x[:, head : head + 1].detach().to(dtype).requires_grad_() for x in case.qkv]
        vector = case.scores[head : head + 1].detach().to(torch.promote_types(dtype, torch.float32))
        leaves.append(vector.requires_grad_())
        score = leaves[3]
        if band is not None:
            # Constant outside of the band, as the kernels take it.
            k = torch.arange(score.shape[-1], device=score.device) - (n - 1)
            held = k.clamp(*(int(e) for e in band[head])) + n - 1
            score = score[:, held]
        if dtype == torch.float64:
            logits = leaves[0] @ leaves[1].transpose(-1, -2) * leaves[0].shape[-1] ** -0.5
            logits = logits + to_matrix(score, n, n)
            if case.causal:
                logits = logits.masked_fill(~hidden, -torch.inf)
            out = logits.softmax(-1) @ leaves[2]
        else:
            mask = torch.where(hidden, 0.0, -torch.inf) if case.causal else None
            out = eager(*leaves[:3], score, mask=mask)
        upstream = case.grad[:, head : head + 1].to(dtype)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    parts = list(zip(*found, strict=True))
    return case.of_parameters([*(torch.cat(p, 1) for p in parts[:4]), torch.cat(parts[4])])


def wrong(name: str, case: Case, band: torch.Tensor | None) -> dict[str, Any]:
    """Return the largest errors over those allowed (twice plain eager code's), and the verdict."""
    true, plain = exactly(case, band, torch.float64), exactly(case, band, case.grad.dtype)
    found = gradients(case.runs[name], case)
    again = gradients(case.runs[name], case)
    report: dict[str, Any] = {}
    names = ["output", "query", "key", "value"]
    names += [f"scores {number}" for number in range(len(found) - 4)]
    for what, got, want, simple in zip(names, found, true, plain, strict=True):
        allowed = 2 * (simple.double() - want).abs().max()
        allowed += 2 * torch.finfo(case.grad.dtype).eps * want.abs().max()
        report[what] = round(float((got.double() - want).abs().max() / allowed), 3)
    report["same bits"] = all(map(torch.equal, found, again))
    report["right"] = all(report[n] <= 1 for n in names) and report["same bits"]
    return report


def far_from(case: Case, name: str, other: str, *, scores: bool = True) -> float:
    """Return the largest difference between two contenders, over the largest number of each."""
    pairs = zip(
        gradients(case.runs[name], case, scores=scores),
        gradients(case.runs[other], case, scores=scores),
        strict=True,
    )
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def keep_alike(case: Case, other: str, names: list[str], *, scores: bool = True) -> None:
    """Drop contenders that differ from another one by more than bfloat16's rounding explains.

    Sizes too large for a check against float64 are compared with kernels that have passed theirs.
    """
    for name in names:
        found = far_from(case, name, other, scores=scores)
        if not found < 0.03:
            print(f"    {name}: differs from {other} by {found:.3f}: dropped", flush=True)
            del case.runs[name]


def graphs(case: Case, *, scored: Callable[[str], bool]) -> dict[str, torch.cuda.CUDAGraph]:
    """Return graphs of each contender's step and of its forward pass alone."""
    found = {}
    for name, run in case.runs.items():
        inputs = (*case.qkv, *([case.scores] if scored(name) else []))
        leaves = [x.detach().requires_grad_() for x in inputs]

        def forward(run=run, leaves=leaves):
            with torch.no_grad():
                return run(*(x.detach() for x in leaves))

        def step(run=run, leaves=leaves):
            return torch.autograd.grad(run(*leaves), leaves, case.grad)

        try:
            found[name] = captured(step, REPEATS)
            found[f"{name} | forward"] = captured(forward, REPEATS)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
    return found


def medians(found: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Return the median milliseconds of one run in each graph, replayed in turns."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for graph in found.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in found.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / REPEATS)
    return {name: torch.tensor(t).median().item() for name, t in times.items()}


def table(title: str, times: dict[str, float]) -> None:
    """Print milliseconds and ratios of one case."""
    limit, limit_forward = times.get("cuDNN"), times.get("cuDNN | forward")
    print(title, flush=True)
    for name, both in times.items():
        if name.endswith("| forward"):
            continue
        forward = times.get(f"{name} | forward", float("nan"))
        ratios = ""
        if limit and limit_forward:
            back = (both - forward) / (limit - limit_forward)
            ratios = f"  × {both / limit:.3f} ({forward / limit_forward:.3f}, {back:.3f})"
        print(f"    {name:32s} {both:8.4f} ms, forward {forward:8.4f}{ratios}", flush=True)


def smooth(arguments: argparse.Namespace, record: dict, dtype: torch.dtype, device: str) -> None:
    """Check and time smooth tails."""
    sound: dict[tuple[int, bool], set[str]] = {}
    checks = [(1024, 1, False)] if interpreted() else [(2048, 1, False), (2048, 1, True)]
    best = None
    for dim in (16,) if interpreted() else arguments.widths:
        for kind in ("near far", "kerple log"):
            scoring, band = curve(kind, dtype, device)
            print(f"{kind}: smooth outside of {band.tolist()}", flush=True)
            for length, batch, causal in checks:
                *qkv, grad = drawn(length, batch, dim, dtype, device)
                vector = scoring(length).detach()
                runs = smooth_runs(dim, band, causal, None)
                runs["present, no band"] = present(None, causal)
                case = Case(qkv, grad, vector, causal, runs, scoring)
                for name in runs:
                    report = wrong(name, case, None)
                    record["checks"][f"{kind}, {dim} wide, n={length}, {causal=}, {name}"] = report
                    print(f"  {dim} wide, n={length}, {causal=}: {name}: {report}", flush=True)
                    if report["right"]:
                        sound.setdefault((dim, causal), set()).add(name)
    if interpreted():
        return
    for dim in arguments.widths:
        for length, batch in SIZES.items():
            for causal in (False, True) if length in (2048, 8192) else (False,):
                if arguments.quick and (length > 8192 or causal):
                    continue
                scoring, band = curve("near far", dtype, device)
                *qkv, grad = drawn(length, batch, dim, dtype, device)
                narrow = torch.tensor([[-64, 64]] * HEADS, dtype=torch.int32, device=device)
                # All variants at first; then the fastest of either kernel.
                some = best if dim == 64 and (length > 2048 or causal) else None
                runs = smooth_runs(dim, band, causal, some)
                if some is None:
                    runs = {n: r for n, r in runs.items() if n in sound.get((dim, causal), ())}
                limit = lambda q, k, v, causal=causal: cudnn(q, k, v, causal)  # noqa: E731
                runs = {
                    "cuDNN": limit, "present, no band": present(None, causal),
                    "present, band 64": present(narrow, causal),
                } | runs  # fmt: skip
                case = Case(qkv, grad, scoring(length).detach(), causal, runs, scoring)
                prototypes = [n for n in runs if n.startswith("smooth")]
                keep_alike(case, "present, no band", prototypes)
                times = medians(graphs(case, scored=lambda name: name != "cuDNN"))
                title = f"n={length} b={batch} d={dim} {causal=}"
                record["times"][f"smooth, {title}"] = times
                table(title, times)
                if dim == 64 and length == 2048 and not causal:
                    best = fastest(times)
                    print(f"    from here on: {best}", flush=True)
                save(arguments, record)


def save(arguments: argparse.Namespace, record: dict) -> None:
    """Write what there is so far."""
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{record['date']}-prototype-smooth.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--widths", type=int, nargs="*", default=[64])
    parser.add_argument("--quick", action="store_true", help="without 32,768 tokens and causal")
    arguments = parser.parse_args()
    device, dtype = ("cpu", torch.float16) if interpreted() else ("cuda", torch.bfloat16)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__, "checks": {}, "times": {},
    }  # fmt: skip
    begin = time.perf_counter()
    smooth(arguments, record, dtype, device)
    save(arguments, record)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
