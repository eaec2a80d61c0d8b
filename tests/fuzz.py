"""Every backend of `tisa.attention` against a float64 oracle, over all arguments at once.

    python tests/fuzz.py --device cuda --minutes 3 --out record.json
    python tests/fuzz.py --seed 0 --dtype bfloat16 --call 17    one call again, with its arguments

Every dtype has processes of its own, all side by side for that many minutes; the record is written
anew whenever one of them ends, so that one that hangs takes nothing of the others along.

A call ends as right, refused (an error of the package, with its reason) or WRONG, printed with the
line that makes it again. The oracle (`fuzz_oracle.py`) is written from the operator's documentation
and shares no code with the package. A result is right if its error is at most twice that of eager
code in the same dtype, both against float64, plus a floor (`Trial.allowed`).

Dropped weights: the package draws one seed with torch.randint(2³¹ − 1) and drops by a hash of seed,
batch, head, query and key, which is computed again here. PyTorch's own dropout ("sdpa") cannot be
asked what it drops: the mean of many draws is compared with the oracle, in standard errors.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import tisa
from fuzz_calls import ALIKE, DTYPES, Drawn, draw
from fuzz_oracle import Results, kept_weights, oracle
from tisa.ops.api import HAS_TRITON
from tisa.ops.ring import Ring, ring_attention

ROOT = Path(__file__).parents[1]
# FlexAttention compiles every structure for many seconds: one row of calls in so many.
FLEX_EVERY = 30
RING_KNOWS = {"is_causal", "scale", "enable_gqa", "band"}
# PyTorch's dropout: so many draws, and by how many standard errors their mean may be off.
DRAWS, WORST_Z = 64, 9.0
FLOAT32 = torch.finfo(torch.float32).eps


class Trial:
    """One drawn call: its exact results, those of eager code, and each backend's beside them."""

    def __init__(self, call: Drawn) -> None:
        self.call = call
        self.dtype, self.device = call.tensors["query"].dtype, call.tensors["query"].device
        self.kept: Tensor | None = None
        if call.invalid is not None:
            return
        if call.options.get("dropout_p"):
            query, keys = call.tensors["query"], call.tensors["key"].shape[-2]
            shape = (*query.shape[:3], keys)
            if "cu_seqlens" in call.options:
                shape = (1, query.shape[1], query.shape[0], query.shape[0])
            torch.manual_seed(call.number)
            seed = torch.randint(2**31 - 1, (), dtype=torch.int32, device=query.device)
            kept = kept_weights(int(seed), call.options["dropout_p"], shape)
            self.kept = kept.to(query.device)
        self.exact = self.run(lambda leaves: oracle(call, leaves, self.kept), exact=True)
        self.terms = self.magnitudes()
        self.plain: dict[bool, Results] = {}

    def run(self, attend: Callable[[Results], Results], *, exact: bool = False) -> Results:
        """Return the outputs of `attend` and the gradients that are wanted."""
        call, leaves = self.call, {}
        for name, tensor in call.tensors.items():
            kind = torch.float64 if exact and tensor.is_floating_point() else tensor.dtype
            # Not cloned where nothing changes: strides are among what is tried.
            leaf = tensor.detach() if kind == tensor.dtype else tensor.detach().to(kind)
            leaves[name] = leaf.requires_grad_(name in call.wanted)
        found = {k: v for k, v in attend(leaves).items() if v is not None}
        outputs = [found["output"]]
        upstream = [call.upstream.to(found["output"].dtype)]
        if not call.options.get("return_lse"):
            found.pop("lse", None)
        elif found["lse"].requires_grad:
            # It depends on no value.
            outputs.append(found["lse"])
            upstream.append(call.upstream_lse.to(found["lse"].dtype))
        if call.wanted:
            inputs = [leaves[name] for name in call.wanted]
            gradients = torch.autograd.grad(outputs, inputs, upstream)
            found |= {f"d{name}": g for name, g in zip(call.wanted, gradients, strict=True)}
        return {name: tensor.detach() for name, tensor in found.items()}

    def magnitudes(self) -> dict[str, float]:
        """Return, for each gradient, how large the terms are that cancel in it.

        dS = P·(dP − Σ P·dP): where a query sees one key alone the bracket is 0, and what is left of
        its terms is their rounding, in whatever order they are summed.
        """
        call = self.call
        weights, packed = self.exact.pop("weights"), "cu_seqlens" in call.options
        self.height, self.lse = (float(self.exact.pop(x)) for x in ("height", "largest lse"))
        query, key, value = (call.tensors[x].double() for x in ("query", "key", "value"))
        upstream, by_lse = call.upstream.double(), call.upstream_lse.double()
        if packed:
            query, key, value, upstream = (
                x.transpose(0, 1)[None] for x in (query, key, value, upstream)
            )
            by_lse = by_lse.transpose(0, 1)[None]
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        returned = (upstream @ value.transpose(-1, -2)).abs()
        # The sum over a head's width cancels too.
        apart = (upstream.square() @ value.square().transpose(-1, -2)).sqrt()
        returned = torch.maximum(returned, apart)
        if self.kept is not None:
            returned = returned * self.kept / (1 - call.options["dropout_p"])
        term = weights * (returned + (weights * returned).sum(-1, keepdim=True))
        if call.options.get("return_lse"):
            term = term + weights * by_lse.abs()[..., None]
        scale = abs(call.options.get("scale", query.shape[-1] ** -0.5))
        squares = term.square()
        sizes = {
            "dquery": (squares @ key.square()).amax().sqrt() * scale,
            "dkey": (squares.transpose(-1, -2) @ query.square()).amax().sqrt() * scale * group**0.5,
            # A band's edge receives what comes back to all that it stands for.
            "dscores": squares.sum((0, -2, -1) if "band" in call.options else (0, -2))
            .amax()
            .sqrt(),
            "dmask": squares.amax().sqrt(),
            "dkey_scores": squares.sum(-2).amax().sqrt(),
            "output": (weights @ value.abs()).amax(),
            "dvalue": (weights.transpose(-1, -2) @ upstream.abs()).amax(),
        }
        return {name: float(size) for name, size in sizes.items()}

    def eager(self, rounded: bool) -> Results:
        """Return the results of eager code in the call's dtype."""
        if rounded not in self.plain:
            self.plain[rounded] = self.run(
                lambda leaves: oracle(self.call, leaves, self.kept, rounded=rounded)
            )
        return self.plain[rounded]

    def attend(self, backend: str, leaves: Results) -> Results:
        """Return a backend's output and log-sum-exp."""
        options = dict(self.call.options)
        inputs = [leaves.get(name) for name in ("query", "key", "value", "scores")]
        torch.manual_seed(self.call.number)
        if backend == "ring":
            length = leaves["query"].shape[2]
            ring = Ring(length, balanced=length % 2 == 0)
            found = ring_attention(*inputs, ring, key_scores=leaves.get("key_scores"), **options)
            return {"output": found}
        options |= {"attn_mask": leaves.get("mask"), "key_scores": leaves.get("key_scores")}
        found = tisa.attention(*inputs, backend=backend, **options)
        if isinstance(found, tuple):
            return {"output": found[0], "lse": found[1]}
        return {"output": found}

    def judge(self, backend: str) -> tuple[str, float, str]:
        """Return "right", "refused" or "wrong", the worst error over what is allowed, and why."""
        call = self.call
        by_chance = call.options.get("dropout_p") and backend in ("sdpa", "auto")
        try:
            if by_chance:
                return self.judge_by_chance(backend)
            found = self.run(lambda leaves: self.attend(backend, leaves))
            # A kernel's error is told to whoever waits for the kernel.
            torch.get_device_module(self.device).synchronize()
        except (ValueError, TypeError) as error:
            known = str(error).startswith(("tisa.attention: ", "ring_attention: "))
            if call.invalid is None and (backend in ("reference", "auto") or not known):
                return "wrong", math.inf, f"refused a call that is right: {error!r}"
            return "refused", 0.0, reason_of(str(error))
        except Exception as error:
            return "wrong", math.inf, in_one_line(error)
        if call.invalid is not None:
            return "wrong", math.inf, f"took a call with a wrong {call.invalid}"
        return self.compared(backend, found)

    def compared(self, backend: str, found: Results) -> tuple[str, float, str]:
        """Return the verdict on results, with the tensor that is worst."""
        by_pytorch = backend == "sdpa" or (backend == "auto" and self.call.plain)
        worst, why, plain = 0.0, "", self.eager(rounded=by_pytorch)
        for name, exact in self.exact.items():
            if name not in found:
                return "wrong", math.inf, f"{name} is missing"
            more = 0.0
            if by_pytorch:
                # Its backward pass computes weights again from a log-sum-exp that is rounded.
                more = 2 * FLOAT32 * self.height * self.terms.get(name, 0.0)
            if backend == "ring":
                # So are its pieces joined, by sums whose scores no row's largest is taken off.
                more = 2 * FLOAT32 * self.lse * self.terms.get(name, 0.0)
            # In which order a product is summed is the library's affair; eager code may be lucky:
            # the same product in rows of 12 and of 3 had 3.1e-5 and 1.1e-5 of error beside a logit
            # of 94.
            rounding = max(self.cancelling() / 2, self.height / 4)
            # A logit's own rounding is that of a log-sum-exp.
            term = 1.0 if name == "lse" else self.terms.get(name, 0.0)
            more = max(more, FLOAT32 * rounding * term)
            ratio = self.ratio(name, found[name], exact, plain[name], more)
            if ratio > worst:
                worst, why = ratio, name
        return ("right" if worst <= 1 else "wrong"), worst, why

    def cancelling(self) -> float:
        """Return how large scores are to which others are added: one of 1e4 and −1e4 leave nothing.

        Nobody promises in which order the product, the scores and the mask are summed.
        """
        scores, of_keys, mask = (self.call.tensors.get(n) for n in ("scores", "key_scores", "mask"))
        mask = None if mask is not None and mask.dtype == torch.bool else mask
        given = [x for x in (scores, of_keys) if x is not None]
        if len(given) + (mask is not None) < 2:
            return 0.0
        return max(float(x.masked_fill(x.isinf(), 0.0).abs().max()) for x in given)

    def ratio(self, name: str, found: Tensor, exact: Tensor, plain: Tensor, more: float) -> float:
        """Return the error of a result over what is allowed."""
        finite = exact.isfinite()
        alike = (found.dtype, found.shape) == (plain.dtype, exact.shape)
        if not alike or not torch.equal(found.isfinite(), finite):
            return math.inf
        if not torch.equal(found[~finite].double(), exact[~finite].double()):
            return math.inf
        if not finite.any():
            return 0.0
        last = torch.finfo(found.dtype).eps
        found, exact, plain = (x.double()[finite] for x in (found, exact, plain))
        error = float((found - exact).abs().max())
        own = float((plain - exact).abs().max())
        return error / (self.allowed(name, own, float(exact.abs().max()), last) + more)

    def allowed(self, name: str, own: float, largest: float, last: float) -> float:
        """Return the error that is allowed: twice the eager code's, and a floor.

        The floor: the last rounding, float32's rounding of numbers of the order of 1 that cancel
        inside, and one rounding of the terms that cancel in a gradient.
        """
        if self.dtype == torch.float64:
            # A mask may be of float32, and its gradient is then.
            return 1e-9 * (1 + largest) + (last * largest if last > 1e-9 else 0.0)
        eps = torch.finfo(self.dtype).eps
        floor = 2 * eps * largest + 64 * FLOAT32
        own = own if math.isfinite(own) else 0.0
        return (
            2 * own
            + floor
            + (0 if name in ("output", "dvalue") else eps * self.terms.get(name, 0.0))
        )

    def judge_by_chance(self, backend: str) -> tuple[str, float, str]:
        """Return the verdict on PyTorch's dropout: the mean of many draws, in standard errors."""
        call, p = self.call, self.call.options["dropout_p"]
        leaves = {name: tensor.detach() for name, tensor in call.tensors.items()}
        total: Any = 0.0
        for number in range(DRAWS):
            torch.manual_seed(number)
            found = tisa.attention(
                *(leaves.get(name) for name in ("query", "key", "value", "scores")),
                attn_mask=leaves.get("mask"), key_scores=leaves.get("key_scores"),
                backend=backend, **call.options,
            )  # fmt: skip
            found = found[0] if isinstance(found, tuple) else found
            total = total + found.double()
        if call.invalid is not None:
            return "wrong", math.inf, f"took a call with a wrong {call.invalid}"
        doubled = {n: t if t.dtype == torch.bool else t.double() for n, t in leaves.items()}
        exact = oracle(call, doubled, None)
        value, output, mean = doubled["value"], exact["output"], total / DRAWS
        if "cu_seqlens" in call.options:
            value, output, mean = (x.transpose(0, 1)[None] for x in (value, output, mean))
        value = value.repeat_interleave(mean.shape[1] // value.shape[1], 1)
        noise = (p / (1 - p) / DRAWS * (exact["weights"].square() @ value.square())).sqrt()
        # Rounding has no mean of 0: it is allowed as in a call without dropout.
        plain = self.run(lambda x: oracle(call, x, None, rounded=True))["output"]
        plain = plain.transpose(0, 1)[None] if "cu_seqlens" in call.options else plain
        rounding = 2 * (plain.double() - output).abs().max() + 1e-5
        rounding = rounding + 4 * torch.finfo(self.dtype).eps * output.abs().max()
        ratio = float(((mean - output).abs() / (WORST_Z * noise + rounding)).max())
        ratio = ratio if math.isfinite(ratio) else math.inf
        return ("right" if ratio <= 1 else "wrong"), ratio, "mean of the output"


def in_one_line(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def reason_of(message: str) -> str:
    """Return a refusal without this call's own numbers."""
    message = message.split("cannot do this call: ")[-1].split("; take backend=")[0]
    return message.split(", got ")[0].removeprefix("tisa.attention: ")[:90]


def name_of(call: Drawn) -> str:
    """Return the dtype of a call."""
    return next(n for n, dtype in DTYPES.items() if dtype == call.tensors["value"].dtype)


class Record:
    """What a run found."""

    def __init__(self) -> None:
        # By dtype.
        self.calls: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.refusals: dict[str, Counter[str]] = {}
        self.worst: dict[str, dict[str, dict[str, list[Any]]]] = {}
        self.tried: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []

    def add(self, call: Drawn, backend: str, outcome: str, ratio: float, why: str) -> None:
        """Count one backend's answer to one call."""
        dtype = name_of(call)
        self.outcomes.setdefault(backend, Counter())[outcome] += 1
        if outcome == "refused":
            self.refusals.setdefault(why, Counter())[backend] += 1
            return
        if outcome == "wrong":
            found = {"call": call.number, "backend": backend, "dtype": dtype, "why": why,
                     "ratio": ratio, "arguments": call.tags}  # fmt: skip
            self.wrong.append(found)
        table = self.worst.setdefault(dtype, {}).setdefault(backend, {})
        for tag in ("any", *call.tags):
            self.tried[tag] += 1
            if ratio >= table.setdefault(tag, [0.0, None, ""])[0]:
                table[tag] = [round(ratio, 4), call.number, why]

    def join(self, other: "Record") -> None:
        """Add what another process found."""
        self.calls += other.calls
        self.tried += other.tried
        self.wrong += other.wrong
        for mine, theirs in ((self.outcomes, other.outcomes), (self.refusals, other.refusals)):
            for name, counts in theirs.items():
                mine.setdefault(name, Counter()).update(counts)
        for dtype, backends in other.worst.items():
            for backend, tags in backends.items():
                table = self.worst.setdefault(dtype, {}).setdefault(backend, {})
                for tag, found in tags.items():
                    table[tag] = max(table.get(tag, found), found, key=lambda worst: worst[0])


def backends_for(call: Drawn, device: str) -> list[str]:
    """Return who is asked for this call."""
    names = ["reference", "chunked", "sdpa", "auto"]
    tensors, options = call.tensors, call.options
    whole = "mask" not in tensors and tensors["query"].shape[-2] == tensors["key"].shape[-2]
    if whole and options.keys() <= RING_KNOWS and call.invalid is None:
        names.append("ring")
    if HAS_TRITON and (device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"):
        names.append("triton")
    # By the number of the row of calls, so that a compiled kernel is used for all of it.
    if device != "cpu" and call.number // ALIKE % FLEX_EVERY == FLEX_EVERY - 1:
        names.append("flex")
    return names


def fuzz(
    numbers: Iterable[int],
    *,
    seed: int = 0,
    device: str = "cpu",
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    longest: int = 4096,
    minutes: float = math.inf,
    loud: bool = False,
) -> Record:
    """Return what was found in the calls of these numbers, or in those that the time allowed."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    record, began = Record(), time.monotonic()
    how = f"--seed {seed} --device {device} --longest {longest} --dtype {' '.join(dtypes)}"
    for number in numbers:
        if time.monotonic() - began > 60 * minutes:
            break
        call = draw(seed, number, device=device, dtypes=dtypes, longest=longest)
        record.calls[name_of(call)] += 1
        if loud:
            print(described(call))
        for backend, (outcome, ratio, why) in verdicts(call, device):
            record.add(call, backend, outcome, ratio, why)
            if loud or outcome == "wrong":
                print(
                    f"{outcome.upper()} {backend}: {why} ({ratio:.3g} of what is allowed; "
                    f"{', '.join(call.tags)})\n    python tests/fuzz.py --call {number} {how}",
                    flush=True,
                )
            if "CUDA error" in why:
                # Nothing on this device works any more.
                return record
    return record


def verdicts(call: Drawn, device: str) -> Iterator[tuple[str, tuple[str, float, str]]]:
    """Yield each backend's verdict; that on the fuzz itself where the oracle fails."""
    try:
        trial = Trial(call)
    except Exception as error:
        yield "oracle", ("wrong", math.inf, in_one_line(error))
        return
    for backend in backends_for(call, device):
        yield backend, trial.judge(backend)


def described(call: Drawn) -> str:
    """Return a call in words."""
    tensors = [
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} strides {t.stride()}"
        for name, t in call.tensors.items()
    ]
    options = [f"{name}={value}" for name, value in call.options.items()]
    return "\n".join((*tensors, *options, f"gradients of {call.wanted}", f"{call.tags}"))


def written(records: list[Record], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the records of all processes as one that can be written."""
    whole = Record()
    for record in records:
        whole.join(record)
    device = settings["device"]
    name = platform.processor()
    if device != "cpu":
        name = torch.get_device_module(torch.device(device)).get_device_name(device)
    return settings | {
        "machine": name or platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "triton": triton_version(),
                     "tisa": tisa.__version__},
        "calls": whole.calls.total(),
        "calls by dtype": whole.calls,
        "outcomes": whole.outcomes,
        "wrong": whole.wrong,
        "refusals": dict(sorted(whole.refusals.items())),
        "answers by argument": dict(whole.tried.most_common()),
        "worst error over what is allowed (ratio, call, tensor)": whole.worst,
    }  # fmt: skip


def main() -> int:
    """Run the command; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, xpu")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--calls", type=int, help="the first so many calls, not all that the time allows"
    )
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="this call alone, described")
    parser.add_argument("--longest", type=int, default=4096, help="no sequence is longer")
    parser.add_argument(
        "--processes", type=int, help="for each dtype; on a GPU as many as there are cores"
    )
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--commit", default=commit(), help="written to the record")
    told = parser.parse_args()
    how = {"seed": told.seed, "device": told.device, "longest": told.longest,
           "minutes": told.minutes}  # fmt: skip
    if told.call is not None:
        found = written([fuzz([told.call], **how, dtypes=tuple(told.dtype), loud=True)], how)
    else:
        found = side_by_side(told, how)
    for backend, outcomes in found["outcomes"].items():
        print(f"{backend:10}", ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
    for dtype, calls in found["calls by dtype"].items():
        worst = found["worst error over what is allowed (ratio, call, tensor)"].get(dtype, {})
        told_worst = ", ".join(f"{backend} {of['any'][0]:.2f}" for backend, of in worst.items())
        print(f"{dtype:10} {calls} calls, worst error over what is allowed: {told_worst}")
    print(f"{found['calls']} calls, {len(found['wrong'])} answers WRONG")
    return 1 if found["wrong"] else 0


def side_by_side(told: argparse.Namespace, how: dict[str, Any]) -> dict[str, Any]:
    """Return the record of all dtypes, each in processes of its own; it is written on the way."""
    cores = os.cpu_count() or 1
    each = told.processes or (1 if told.device == "cpu" else max(1, cores // len(told.dtype)))
    how = how | {"dtypes": told.dtype, "processes of a dtype": each, "commit": told.commit}
    records: list[Record] = []
    with ProcessPoolExecutor(each * len(told.dtype), get_context("spawn")) as pool:
        shares = [
            pool.submit(_share, told, dtype, number, each)
            for dtype in told.dtype
            for number in range(each)
        ]
        for done in as_completed(shares):
            records.append(done.result())
            found = written(records, how | {"processes that ended": len(records)})
            if told.out is not None:
                told.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


def _share(told: argparse.Namespace, dtype: str, mine: int, processes: int) -> Record:
    torch.set_num_threads(1)
    numbers = count() if told.calls is None else range(told.calls)
    return fuzz(
        # Rows of calls, not calls, are dealt out: a row shares its compiled kernels.
        (n for n in numbers if n // ALIKE % processes == mine),
        seed=told.seed, device=told.device, dtypes=(dtype,), longest=told.longest,
        minutes=told.minutes,
    )  # fmt: skip


def triton_version() -> str | None:
    """Return Triton's version; distributions of PyTorch bring it under several names."""
    return str(import_module("triton").__version__) if HAS_TRITON else None


def commit() -> str:
    """Return the commit that is checked out, if git can say; that of commit.txt where one lies."""
    if (ROOT / "commit.txt").is_file():
        return (ROOT / "commit.txt").read_text().strip()
    if shutil.which("git") is None:
        return "unknown"
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent, capture_output=True, text=True,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
