"""A training step of a converted BERT in each attention implementation, beside the stock model.

    PYTHONPATH=. python3 benchmarks/converted.py [--device cuda] [--lengths 128 512] [--out FOLDER]
        [--shapes 32x64 1x512] [--only "stock, sdpa" "converted, tisa"]

BERT base's shape (12 layers, 768 wide, 12 heads) with random weights and no head; converted: the
position table replaced, five trained kernels per head. "step" is forward and backward, "forward"
without gradients. Contenders take turns. `least` is the least time of all turns, which is what can
be compared on a machine that is busy with other things. On a GPU with bfloat16 weights, on a CPU in
float32. A contender whose output is off that of eager attention by more than 3e-5 (float32) or 5 %
(bfloat16) is not timed.
"""

import argparse
import copy
import json
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import tisa.hf

RESULTS = Path(__file__).parent / "results"
STOCK = ("eager", "sdpa")
OURS = ("tisa", "sdpa", "eager")


def models(layers: int, device: str, dtype: torch.dtype) -> dict:
    """Return the contenders by name, all with the same weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers, max_position_embeddings=8192)
    stock = transformers.BertModel(config, add_pooling_layer=False).eval()
    tokens = [[101, *range(1000, 1000 + n), 102] for n in (20, 30, 40)]
    converted = tisa.hf.convert(
        stock, positions="replace", init="reference", calibration=tokens
    ).eval()
    made = {}
    for kind, model, names in (("stock", stock, STOCK), ("converted", converted, OURS)):
        for name in names:
            if kind == "stock":
                # A config of its own: the implementation is written into it.
                one = transformers.BertModel(copy.deepcopy(config), add_pooling_layer=False).eval()
            else:
                one = tisa.hf.convert(stock, positions="replace", init="zero", calibration=tokens)
            one.load_state_dict(model.state_dict())
            one.set_attn_implementation(name)
            made[f"{kind}, {name}"] = one.eval().to(device=device, dtype=dtype)
    return made


def off_by(contenders: dict, ids: torch.Tensor) -> dict[str, float]:
    """Return how far each output is from that of eager attention, relative to its size."""
    found = {}
    with torch.no_grad():
        for kind in ("stock", "converted"):
            reference = contenders[f"{kind}, eager"](input_ids=ids)[0].float()
            for name, model in contenders.items():
                if name.startswith(kind):
                    off = (model(input_ids=ids)[0].float() - reference).norm() / reference.norm()
                    found[name] = float(off)
    return found


def timed(call, device: str) -> float:
    if device == "cpu":
        began = time.process_time()
        call()
        return 1000 * (time.process_time() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measured(contenders: dict, ids: torch.Tensor, rounds: int, device: str) -> list[dict]:
    def forward(model):
        with torch.no_grad():
            model(input_ids=ids)

    def step(model):
        model(input_ids=ids)[0].float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    rows = []
    for mode, call in (("forward", forward), ("step", step)):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            for name, model in contenders.items():
                took = timed(lambda m=model, c=call: c(m), device)
                if turn:  # the first warms up
                    times[name].append(took)
        base = torch.tensor(times["stock, sdpa"]).quantile(0.5)
        least = min(times["stock, sdpa"])
        for name, some in times.items():
            low, middle, high = torch.tensor(some).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
            rows.append({
                "contender": name, "mode": mode, "batch": ids.shape[0], "length": ids.shape[1],
                "ms": {"p20": low, "p50": middle, "p80": high, "least": min(some)},
                "x stock sdpa": middle / float(base), "x stock sdpa, least": min(some) / least,
            })  # fmt: skip
    return rows


def without(words: list[str], *options: str) -> list[str]:
    """Return a command line without options that say where a record goes."""
    return [
        word for before, word in zip(["", *words], words, strict=False)
        if word not in options and before not in options
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512])
    parser.add_argument(
        "--shapes", nargs="*", help="batch x length, in place of lengths and tokens"
    )
    parser.add_argument("--only", nargs="*", help="the contenders that are timed")
    parser.add_argument("--tokens", type=int, help="in a batch; 1,024 on a CPU, 16,384 on a GPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    tokens = args.tokens or (1024 if cpu else 16_384)
    allowed = 3e-5 if cpu else 0.05
    contenders = models(args.layers, args.device, dtype)
    if not cpu:
        from tisa.ops.triton import native

        # What a training loop goes over to after 200 calls.
        native.switch(True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if cpu
        else torch.cuda.get_device_name(),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "commit": args.commit,
        "command": shlex.join(["python3", *without(sys.argv, "--out", "--commit")]),
        "clock": "processor time of all threads" if cpu else "the GPU's",
        "what": __doc__.split("\n\n")[2], "rows": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-converted-{'cpu' if cpu else 'gpu'}.json"
    shapes = [(max(1, tokens // length), length) for length in args.lengths]
    if args.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    for shape in shapes:
        ids, length = torch.randint(1000, 30000, shape, device=args.device), shape[1]
        ids[:, 0], ids[:, -1] = 101, 102
        off = off_by(contenders, ids)
        sound = {name: model for name, model in contenders.items() if off[name] <= allowed}
        record.setdefault("off by", {})[str(length)] = off
        record.setdefault("not timed", {})[str(length)] = sorted(set(contenders) - set(sound))
        if args.only:
            sound = {name: model for name, model in sound.items() if name in args.only}
        record["rows"] += measured(sound, ids, args.rounds, args.device)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for row in record["rows"][-2 * len(sound) :]:
            print(
                f"{row['length']:>5} {row['mode']:<8} {row['contender']:<18} "
                f"{row['ms']['p50']:9.2f} ms {row['x stock sdpa']:6.2f} x, "
                f"least {row['x stock sdpa, least']:.3f} x", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
