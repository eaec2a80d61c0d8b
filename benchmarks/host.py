"""What a call costs the host in eager code, part by part, and which caches hit.

    PYTHONPATH=. python3 benchmarks/host.py [--out FOLDER]

Times are microseconds of the host for a call, the least of many rounds in which the contenders take
turns; nobody waits for the GPU within one. "both" is forward and backward. 12 heads, 64 wide,
bfloat16; plain SDPA is called as it is, without a context that chooses its backend. What ends in
"C++" was made by `tisa.ops.triton.native`. Caches are counted over steps of a BERT of 12 layers
(random weights) that was converted, after five steps.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tisa
from tisa.ops import repeats
from tisa.ops.triton import launching, native
from tisa.scoring.layers import bands_of, scores_of

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH, LAYERS = 12, 64, 12
Parts = dict[str, Callable[[], Any]]


class Counted(dict):  # type: ignore[type-arg]
    """A cache that counts how often something was found in it."""

    def __init__(self, tally: dict[str, int]) -> None:
        super().__init__()
        self.tally = tally

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what is found."""
        found = super().get(key, default)
        if key is not None:
            self.tally["misses" if found is None else "hits"] += 1
        return found


@contextmanager
def counted() -> Iterator[dict[str, dict[str, int]]]:
    """Count hits and misses of every cache between a call and its launches; they begin empty."""
    tallies = {name: {"hits": 0, "misses": 0} for name in ("repeats", "shapes", "templates")}
    kept = repeats._repeats, launching._shapes, launching.Shape

    class Shape(launching.Shape):
        def __init__(self) -> None:
            super().__init__()
            self.templates = Counted(tallies["templates"])

    repeats._repeats, launching._shapes = Counted(tallies["repeats"]), Counted(tallies["shapes"])
    launching.Shape = Shape  # type: ignore[misc]
    try:
        yield tallies
    finally:
        repeats._repeats, launching._shapes, launching.Shape = kept  # type: ignore[misc]


class Empty(torch.autograd.Function):
    """An autograd.Function in Python that does nothing: what any such costs."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return the query."""
        ctx.others = others
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient for each."""
        return gradients[0], *ctx.others


def parts(tokens: int, device: str) -> Parts:
    """Return the parts of a call by name, and the same of plain attention."""
    shape = (1, HEADS, tokens, WIDTH)
    qkv = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
    upstream = torch.randn_like(qkv[0])
    scoring = tisa.TISA(HEADS).to(device)
    leaf, band = scoring(tokens).detach().requires_grad_(), scoring.band(torch.bfloat16)
    parameters = list(scoring.parameters())
    upstream_scores = torch.randn_like(leaf)

    def whole() -> Any:
        return tisa.attention(*qkv, scoring)

    def both(forward: Callable[[], Any], leaves: list[torch.Tensor], up: torch.Tensor) -> Any:
        return lambda: torch.autograd.grad(forward(), leaves, up)

    plain = torch.nn.functional.scaled_dot_product_attention
    return {
        "SDPA, forward": lambda: plain(*qkv),
        "SDPA, both": both(lambda: plain(*qkv), qkv, upstream),
        "empty Function, forward": lambda: Empty.apply(*qkv),
        "empty Function, both": both(lambda: Empty.apply(*qkv), qkv, upstream),
        "attention, forward": lambda: tisa.attention(*qkv, leaf, band=band),
        "attention, both": both(
            lambda: tisa.attention(*qkv, leaf, band=band), [*qkv, leaf], upstream
        ),
        "scores, forward": lambda: scores_of([scoring], tokens),
        "scores, both": both(lambda: scores_of([scoring], tokens)[0], parameters, upstream_scores),
        "band": lambda: bands_of([scoring], torch.bfloat16),
        "whole, forward": whole,
        "whole, both": both(whole, [*qkv, *parameters], upstream),
    }


def wait(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def with_cpp(contenders: Parts, names: tuple[str, ...]) -> Parts:
    """Return the contenders, and those named once more in C++."""
    if repeats.native is None:
        return contenders
    return contenders | {f"{name}, C++": contenders[name] for name in names}


def least(contenders: Parts, device: str, rounds: int, calls: int) -> dict[str, float]:
    """Return for each the least time of the host for a call, in microseconds."""
    found = dict.fromkeys(contenders, float("inf"))
    cpp = repeats.native
    for turn in range(rounds):
        for name, call in contenders.items():
            repeats.native = cpp if name.endswith("C++") else None
            call()
            wait(device)
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if turn:  # the first warms up
                found[name] = min(found[name], 1e6 * (time.perf_counter() - began) / calls)
    repeats.native = cpp
    return {name: round(micro, 1) for name, micro in found.items()}


def models(device: str, layers: int) -> dict[str, Any]:
    """Return a BERT of base size, stock and converted."""
    import transformers

    import tisa.hf

    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.BertModel(config, add_pooling_layer=False)
    tokens = [[101, *range(1000, 1000 + n), 102] for n in (20, 30, 40)]
    converted = tisa.hf.convert(stock, positions="replace", init="reference", calibration=tokens)
    converted.set_attn_implementation("tisa")
    pair = {"stock": stock, "converted": converted}
    return {name: model.to(device=device, dtype=torch.bfloat16) for name, model in pair.items()}


def step_of(model: Any, lengths: list[int], device: str) -> Callable[[], None]:
    """Return what makes a training step, each on the next of these lengths."""
    batches = [torch.randint(1000, 30000, (4, n), device=device) for n in lengths]
    turn = iter(range(1 << 30))

    def step() -> None:
        ids = batches[next(turn) % len(batches)]
        model(input_ids=ids)[0].float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def rates(step: Callable[[], None], steps: int) -> dict[str, dict[str, int]]:
    """Return hits and misses of every cache over so many steps, after five."""
    cpp, repeats.native = repeats.native, None
    with counted() as tallies:
        for _ in range(5):
            step()
        for tally in tallies.values():
            tally.update(hits=0, misses=0)
        for _ in range(steps):
            step()
    repeats.native = cpp
    if cpp is not None:
        for _ in range(5):
            step()
        before = cpp.counts()
        for _ in range(steps):
            step()
        hits, misses, *backward = [b - a for a, b in zip(before, cpp.counts(), strict=True)]
        tallies["calls, C++"] = {"hits": hits, "misses": misses}
        tallies["backward, C++"] = dict(zip(("hits", "misses"), backward, strict=True))
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--driver", default="libcuda.so.1", help="the driver's library")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "commit": args.commit,
        "command": "python3 benchmarks/host.py", "what": __doc__.split("\n\n")[2],
        "microseconds": {}, "steps": {}, "caches": {},
    }  # fmt: skip
    path = args.out / f"{record['date']}-host.json"

    def note(kind: str, name: str, found: Any) -> None:
        record[kind][name] = found
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{kind} {name}: {json.dumps(found)}", flush=True)

    began = time.perf_counter()
    native.switch(True, args.driver)
    record["C++"] = native.state
    print(f"C++: {native.state}, {time.perf_counter() - began:.0f} s", flush=True)
    again = tuple(
        f"{part}, {way}" for part in ("attention", "whole") for way in ("forward", "both")
    )
    for tokens in args.tokens:
        contenders = with_cpp(parts(tokens, args.device), again)
        note("microseconds", str(tokens), least(contenders, args.device, args.rounds, 10))
    pair = models(args.device, args.layers)
    for tokens in args.tokens:
        steps = {name: step_of(model, [tokens], args.device) for name, model in pair.items()}
        steps = with_cpp(steps, ("converted",))
        note("steps", str(tokens), least(steps, args.device, max(2, args.rounds // 2), 1))
    lengths_of = {"one length": [128], "eight lengths": [128 - 8 * n for n in range(8)]}
    for name, lengths in lengths_of.items():
        step = step_of(pair["converted"], lengths, args.device)
        note("caches", name, rates(step, args.steps))


if __name__ == "__main__":
    main()
