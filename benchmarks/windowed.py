"""A window with sinks beside attention to everything: the operator, and a converted encoder.

    PYTHONPATH=. python3 benchmarks/windowed.py [--rounds 20] [--out FOLDER] [--commit HASH]
    TRITON_INTERPRET=1 PYTHONPATH=. python3 benchmarks/windowed.py --rehearse

`operator`: forward and backward, to query, key, value and the kernels of a pretrained layer
(benchmarks/fitted.py), 12 heads 64 wide, bfloat16; a window of 128, the first and the last token
beside it, against the fused call without a window. `window alone` has no such tokens. `by PyTorch`
joins them without the GPU kernels that are made for it (`tisa.ops.always`). `graph`: a captured
CUDA graph; `eager`: a loop from Python. `encoder`: the forward pass of a converted BERT base with
random weights. All take turns. Nothing is timed that is wrong: outputs and gradients at 700 tokens
are compared with the reference in float64 first.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from converted import without
from whole_call import HEADS, fitted

import tisa
import tisa.hf
from tisa.ops.triton import joined

RESULTS = Path(__file__).parent / "results"
WINDOW = 128
DENSE, WINDOWED = "no window", "window and sinks"
ALONE, BY_PYTORCH = "window alone", "window and sinks, by PyTorch"


@cache
def ends(batch: int, length: int, device: str) -> torch.Tensor:
    return torch.tensor([[0, length - 1]] * batch, device=device)


def options(name: str, batch: int, length: int, device: str) -> dict:
    """Return what `tisa.attention` is told besides the tensors."""
    if name == DENSE:
        return {}
    more = {} if name == ALONE else {"always": ends(batch, length, device)}
    return {"window": WINDOW, **more}


def gradients(name: str, qkv, scoring, upstream, backend: str = "triton") -> list[torch.Tensor]:
    """Return the output and the gradients of query, key, value and the kernels."""
    able = joined.can_join
    if name == BY_PYTORCH:
        joined.can_join = lambda *told: False
    try:
        batch, _, length, _ = qkv[0].shape
        given = options(name, batch, length, qkv[0].device.type)
        out = tisa.attention(*qkv, scoring, backend=backend, **given)
    finally:
        joined.can_join = able
    return [out.detach(), *torch.autograd.grad(out, [*qkv, *scoring.parameters()], upstream)]


def drawn(batch: int, length: int, dim: int, device: str, dtype: torch.dtype):
    generator = torch.Generator(device).manual_seed(0)
    made = [
        torch.randn(batch, HEADS, length, dim, generator=generator, device=device).to(dtype)
        for _ in range(4)
    ]
    return [x.requires_grad_() for x in made[:3]], made[3]


def checked(scoring, length: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return by contender the largest error of all, relative to the largest number of each."""
    qkv, upstream = drawn(1, length, 64 if device == "cuda" else 16, device, dtype)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    # Its scores, float32 as ever: they take float64 beside float64 inputs.
    exact = {}
    for name in (DENSE, WINDOWED, ALONE):
        exact[name] = gradients(name, wide, scoring, upstream.double(), "reference")
    exact[BY_PYTORCH] = exact[WINDOWED]
    found = {}
    for name, expected in exact.items():
        pairs = zip(gradients(name, qkv, scoring, upstream), expected, strict=True)
        found[name] = max(
            float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs
        )
    return found


def timed(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def by_the_clock(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return quantiles of the milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            took = timed(call) if torch.cuda.is_available() else by_the_clock(call)
            if turn >= 3:
                times[name].append(took)
    quantiles = torch.tensor([0.2, 0.5, 0.8])
    found = {n: torch.tensor(some).quantile(quantiles).tolist() for n, some in times.items()}
    return {name: dict(zip(("p20", "p50", "p80"), three, strict=True))
            for name, three in found.items()}  # fmt: skip


def operator_rows(shapes, scoring, rounds: int, device: str, dtype: torch.dtype):
    """Yield a row for each shape, way of calling and contender."""
    for batch, length in shapes:
        qkv, upstream = drawn(batch, length, 64 if device == "cuda" else 16, device, dtype)
        calls = {
            name: partial(gradients, name, qkv, scoring, upstream)
            for name in (DENSE, WINDOWED, ALONE, BY_PYTORCH)
        }
        ways = {"eager": calls}
        if device == "cuda":
            ways["graph"] = {name: captured(call) for name, call in calls.items()}
        for way, some in ways.items():
            found = in_turns(some, rounds)
            for name, ms in found.items():
                yield {"what": "operator", "way": way, "batch": batch, "length": length,
                       "contender": name, "ms": ms,
                       "x no window": ms["p50"] / found[DENSE]["p50"]}  # fmt: skip


def encoder(layers: int, device: str, dtype: torch.dtype):
    """Return a converted BERT base, which a window can be put into."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers)
    stock = transformers.BertModel(config, add_pooling_layer=False).eval()
    tokens = [[101, *range(1000, 1000 + n), 102] for n in (20, 30, 40)]
    made = tisa.hf.convert(stock, init="reference", calibration=tokens, window=WINDOW, sinks="ends")
    return made.eval().to(device=device, dtype=dtype)


@torch.no_grad()
def forward(model, window: int | None, **given) -> None:
    model.config.tisa |= {"window": window}
    model(**given)


def encoder_rows(shapes, layers: int, rounds: int, device: str, dtype: torch.dtype):
    """Yield a row for each shape and contender: the forward pass, whole inputs and padded ones."""
    model = encoder(layers, device, dtype)
    described = dict(model.config.tisa)
    for batch, length in shapes:
        ids = torch.randint(1000, 30_000, (batch, length), device=device)
        ids[:, 0], ids[:, -1] = 101, 102
        mask = torch.ones_like(ids)
        mask[0, length - length // 8 :] = 0

        calls = {
            DENSE: partial(forward, model, None, input_ids=ids),
            WINDOWED: partial(forward, model, WINDOW, input_ids=ids),
            f"{DENSE}, padded": partial(forward, model, None, input_ids=ids, attention_mask=mask),
            f"{WINDOWED}, padded": partial(
                forward, model, WINDOW, input_ids=ids, attention_mask=mask
            ),
        }
        found = in_turns(calls, rounds)
        for name, ms in found.items():
            base = found[f"{DENSE}, padded" if "padded" in name else DENSE]["p50"]
            yield {"what": "encoder", "way": "eager", "batch": batch, "length": length,
                   "contender": name, "ms": ms, "x no window": ms["p50"] / base}  # fmt: skip
    model.config.tisa |= described


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rehearse", action="store_true", help="tiny, interpreted, not timed")
    args = parser.parse_args()
    device, dtype, rounds = "cuda", torch.bfloat16, args.rounds
    shapes, encoded, layers, length = [(1, 8192), (2, 8192), (1, 32_768)], [(2, 8192)], 12, 700
    if args.rehearse:
        device, dtype, rounds = "cpu", torch.float16, 1
        shapes, encoded, layers, length = [(1, 40)], [(2, 24)], 1, 150
    scoring = fitted()[0].to(device)
    errors = checked(scoring, length, device, dtype)
    print("largest errors", {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
    # Of kernels that stand far away, gradients are small differences: 4 % in the dense call too.
    wrong = [name for name, error in errors.items() if not error <= 0.1]
    if wrong:
        sys.exit(f"not timed, they are wrong: {', '.join(wrong)}")
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": platform.machine() if args.rehearse else torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "commit": args.commit,
        "command": shlex.join(["python3", *without(sys.argv, "--out", "--commit")]),
        "what": __doc__.split("\n\n")[2], "window": WINDOW, "errors": errors, "rows": [],
    }  # fmt: skip
    rows = [operator_rows(shapes, scoring, rounds, device, dtype)]
    # The interpreter multiplies no bfloat16, and a CPU's linear layers take float32.
    rows.append(
        encoder_rows(encoded, layers, rounds, device, torch.float32 if args.rehearse else dtype)
    )
    path = args.out / f"{record['date']}-windowed-{'rehearsal' if args.rehearse else 'gpu'}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    for some in rows:
        for row in some:
            record["rows"].append(row)
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(
                f"{row['what']:<9}{row['way']:<7}{row['batch']:>2} x {row['length']:>6}  "
                f"{row['contender']:<30}{row['ms']['p50']:9.3f} ms {row['x no window']:6.3f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
