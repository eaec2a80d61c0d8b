"""Stock models whose positions are scores of the offset, as transformers runs them and fused.

    PYTHONPATH=.:lab python3 benchmarks/fused_models.py [--device cuda] [--models "t5-base" …]
        [--sizes 512x32 2048x8] [--work step forward first] [--compiled] [--out FILE]

Random weights, the config of the published model, its dropout too in a training step. Contenders
take turns: stock with every attention implementation that transformers has for the model, each with
a config of its own (models that share one share its implementation), and `tisa.hf.fuse`, called as
a user calls it, from eager code; with --compiled all of them through `torch.compile`, too.

step     forward and backward, of the sum of squares of the last states (a pair of encoder and
         decoder: the loss), no optimiser: times in ms and memory above the loaded weights
forward  without gradients
first    a decoder's first token: `generate(max_new_tokens=1)`
tokens   the time of each further one, of 32

On a GPU with bfloat16 weights, on a CPU in float32; there memory is the process's highest, read in
one of its own. Nothing is timed that is wrong: before, each contender's states for 200 tokens in
float32 must be those of stock eager (ALiBi: within what stock rounds).
"""

import argparse
import copy
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import tisa
from tisa_lab.record import surroundings

STOCK = ("eager", "sdpa", "flex_attention")
OURS = "fused"
COMPILED = ", compiled"
DECODED = 512  # tokens of a target
FURTHER = 32
# Relative, of states in float32. MPT and BLOOM round their biases.
OFF = 2e-4
WAYS = ("step", "forward", "first", "tokens")

T5_LARGE = dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16)
T5_BASE = dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12)


@dataclass(frozen=True)
class Shape:
    """A model of the benchmark, and in what it is stock."""

    # Of a name of stock attention, or None for the default.
    make: Callable[[str | None], Any]
    stock: tuple[str, ...] = STOCK
    decoder: bool = False


def maker(cls: str, config: str, sizes: dict[str, Any], **settings: Any) -> Callable[..., Any]:
    """Return what makes a model whose every part has that attention.

    It is asked for when a model is made: transformers 5.17 changes it afterwards for the whole of a
    T5 and not for its two stacks, which then go on with the default under another name.
    """
    make = getattr(transformers, cls)._from_config
    new = getattr(transformers, config)
    # transformers 5.17 gives a config that is made here no token that a decoder begins with.
    sizes = {"decoder_start_token_id": 0} | sizes if config == "T5Config" else sizes
    return lambda name: make(new(**sizes), attn_implementation=name, **settings)


def t5(cls: str = "T5EncoderModel", **sizes: Any) -> Callable[..., Any]:
    """Return what makes a T5."""
    return maker(cls, "T5Config", sizes)


PAIR = "T5ForConditionalGeneration"
# Longer than published: their tables of positions would end before the benchmark does.
MPNET = dict(vocab_size=30_527, max_position_embeddings=70_000)
BLOOM = dict(hidden_size=1024, n_layer=24, n_head=16)
SHAPES = {
    "t5 of 3 layers x 512": Shape(
        t5(d_model=512, d_ff=2048, num_layers=3, num_heads=8), ("eager", "sdpa")
    ),
    "t5-base encoder": Shape(t5(**T5_BASE)),
    "t5-base": Shape(t5(PAIR, **T5_BASE), decoder=True),
    "t5-large encoder": Shape(t5(**T5_LARGE)),
    "t5-large": Shape(t5(PAIR, **T5_LARGE), decoder=True),
    "mpnet-base": Shape(
        maker("MPNetModel", "MPNetConfig", MPNET, add_pooling_layer=False), ("eager",)
    ),
    "bloom-560m": Shape(maker("BloomModel", "BloomConfig", BLOOM), ("eager",)),
}


@dataclass(frozen=True)
class Work:
    """One thing that is done with a model, for inputs of one size."""

    way: str
    length: int
    batch: int

    def inputs(self, model: Any, device: str) -> dict[str, torch.Tensor]:
        """Return tokens, and targets of a model that has a decoder."""
        generator = torch.Generator().manual_seed(0)

        def drawn(length: int) -> torch.Tensor:
            ids = torch.randint(1000, 30_000, (self.batch, length), generator=generator)
            return ids.to(device)

        given = {"input_ids": drawn(self.length)}
        if model.config.is_encoder_decoder and self.way in ("step", "forward"):
            given["labels"] = drawn(DECODED)
        return given

    def do(self, model: Any, given: dict[str, torch.Tensor]) -> None:
        """Do it once."""
        if self.way == "step":
            made = model(**given)
            loss = made.get("loss")
            loss = made[0].float().square().sum() if loss is None else loss
            loss.backward()
            model.zero_grad(set_to_none=True)
            return
        with torch.no_grad():
            if self.way == "forward":
                model(**given)
                return
            more = 1 if self.way == "first" else FURTHER + 1
            model.generate(**given, max_new_tokens=more, min_new_tokens=more, do_sample=False)


def contenders(
    shape: Shape, device: str, dtype: torch.dtype, compiled: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return models of the same weights by name, and why others are none."""
    made: dict[str, Any] = {}
    lacking: dict[str, str] = {}
    for name in (*shape.stock, OURS):
        torch.manual_seed(0)
        try:
            model = shape.make(None if name == OURS else name)
            if name == OURS:
                tisa.hf.fuse(model)
            parts = {p.config._attn_implementation for p in model.modules() if hasattr(p, "config")}
            assert parts == {"tisa-fused" if name == OURS else name}, parts
        except (ValueError, ImportError) as refused:
            lacking[name] = str(refused).splitlines()[0]
            continue
        off = _off(model, shape, device)
        if not off <= OFF:
            lacking[name] = f"off by {off:.1e} of stock eager's states"
            continue
        made[name] = model.to(device=device, dtype=dtype)
    if compiled:
        # The same weights: of two compiled ways through one module none knows of the other.
        made |= {
            f"{name}{COMPILED}": torch.compile(copy.deepcopy(model), dynamic=False)
            for name, model in made.items()
        }
    return made, lacking


@torch.no_grad()
def _off(model: Any, shape: Shape, device: str) -> float:
    """Return how far a contender is from stock eager, in float32."""
    torch.manual_seed(0)
    stock = shape.make("eager")
    given = Work("forward", 200, 1).inputs(stock, device)
    states = []
    for one in (stock.to(device).eval(), model.to(device).eval()):
        out = one(**given)
        states.append(out.logits if "logits" in out else out[0])
    return float((states[1] - states[0]).norm() / states[0].norm())


def timed(work: Work, model: Any, given: dict[str, torch.Tensor], device: str) -> float:
    """Return the milliseconds that it takes."""
    if device == "cpu":
        began = time.perf_counter()
        work.do(model, given)
        return 1000 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work.do(model, given)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measured(work: Work, models: dict[str, Any], rounds: int, device: str) -> list[dict[str, Any]]:
    """Return a row of each contender: its times, and the memory of a GPU above the weights."""
    times: dict[str, list[float]] = {name: [] for name in models}
    memory: dict[str, float] = {}
    broken: dict[str, str] = {}
    for turn in range(rounds + 1):
        for name, model in models.items():
            if name in broken:
                continue
            model.train(work.way == "step")
            given = work.inputs(model, device)
            try:
                if device != "cpu" and turn == 1:
                    torch.cuda.reset_peak_memory_stats()
                    loaded = torch.cuda.memory_allocated()
                took = timed(work, model, given, device)
            except (torch.OutOfMemoryError, ValueError) as failed:
                # "flex_attention does not support dropout"
                full = isinstance(failed, torch.OutOfMemoryError)
                broken[name] = "out of memory" if full else str(failed).splitlines()[0]
                model.zero_grad(set_to_none=True)
                gc.collect()
                torch.cuda.empty_cache()
                continue
            if device != "cpu" and turn == 1:
                memory[name] = (torch.cuda.max_memory_allocated() - loaded) / 2**20
            if turn:  # the first warms up
                times[name].append(took)
    rows = []
    for name in models:
        row: dict[str, Any] = {**vars(work), "contender": name}
        if name in broken:
            row["error"] = broken[name]
        else:
            row |= {"ms": median(times[name]), "least": min(times[name]), "most": max(times[name])}
            row["MiB"] = memory.get(name)
        rows.append(row)
    return rows


def memory_on_cpu(shape: str, name: str, work: Work) -> float | None:
    """Return the MiB that a process needs above its loaded weights, of one that only does this."""
    command = [
        sys.executable, __file__, "--models", shape, "--sizes", f"{work.length}x{work.batch}",
        "--work", work.way, "--only", name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def highest() -> float:
    """Return the highest MiB of this process since the last call, on Linux."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) / 1024


def told(rows: list[dict[str, Any]]) -> str:
    """Return rows as text, each beside the best stock one."""
    best = min(
        (r["ms"] for r in rows if "ms" in r and not r["contender"].startswith(OURS)), default=None
    )
    lines = []
    for row in rows:
        size = f"{row['model']:<20} {row['way']:<8} {row['length']:>6} x {row['batch']:<3}"
        if "ms" not in row:
            lines.append(f"{size} {row['contender']:<24} {row['error']}")
            continue
        faster = f"{best / row['ms']:6.2f} x as fast as the best stock one" if best else ""
        mib = "" if row["MiB"] is None else f"{row['MiB']:9.0f} MiB"
        lines.append(f"{size} {row['contender']:<24} {row['ms']:10.1f} ms {mib} {faster}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write after each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=["t5 of 3 layers x 512"], choices=SHAPES)
    parser.add_argument("--sizes", nargs="*", default=["512x1", "2048x1"], help="length x batch")
    parser.add_argument("--work", nargs="*", default=["step", "forward"], choices=WAYS)
    parser.add_argument("--dropout", type=float, help="instead of the config's")
    parser.add_argument("--stock", nargs="*", help="only these implementations of stock attention")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    if args.only:
        ((length, batch),) = sizes
        print(_memory(SHAPES[args.models[0]], args.only, Work(args.work[0], length, batch)))
        return
    record: dict[str, Any] = surroundings(" ".join(["benchmarks/fused_models.py", *sys.argv[1:]]),
                                          torch.device(args.device))  # fmt: skip
    record |= {"transformers": transformers.__version__, "threads": torch.get_num_threads()}
    record |= {"rows": [], "not timed": {}}
    if args.device != "cpu":
        from tisa.ops.triton import native

        # What a training loop goes over to after 200 calls.
        native.switch(True)
        record["calls in C++"] = native.state
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    for name in args.models:
        shape = SHAPES[name]
        if args.stock is not None:
            shape = replace(shape, stock=tuple(s for s in shape.stock if s in args.stock))
        models, lacking = contenders(shape, args.device, dtype, args.compiled)
        if args.dropout is not None:
            for model in models.values():
                _set_dropout(model, args.dropout)
        record["not timed"][name] = lacking
        print(f"{name}: not timed: {lacking}", flush=True)
        for length, batch in sizes:
            for way in args.work:
                if way in ("first", "tokens") and not SHAPES[name].decoder:
                    continue
                work = Work(way, length, batch)
                rows = measured(work, models, args.rounds, args.device)
                for row in rows:
                    row["model"] = name
                    if args.device == "cpu" and way == "step" and COMPILED not in row["contender"]:
                        row["MiB"] = memory_on_cpu(name, row["contender"], work)
                record["rows"] += rows
                print(told(rows), flush=True)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(record, indent=1) + "\n")
        del models
        gc.collect()


def _memory(shape: Shape, name: str, work: Work) -> float:
    models, _ = contenders(Shape(shape.make, () if name == OURS else (name,)), "cpu",
                           torch.float32, compiled=False)  # fmt: skip
    model = models[name].train(work.way == "step")
    given = work.inputs(model, "cpu")
    # What a first call makes once is no part of it.
    Work(work.way, 16, 1).do(model, Work(work.way, 16, 1).inputs(model, "cpu"))
    highest()
    loaded = highest()
    work.do(model, given)
    return highest() - loaded


def _set_dropout(model: Any, p: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = p


if __name__ == "__main__":
    main()
