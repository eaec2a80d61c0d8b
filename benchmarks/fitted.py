"""Kernels fitted to a pretrained model's heads, for benchmarks/fused.py: bands as they are in use.

    PYTHONPATH=.:lab python3 benchmarks/fitted.py MODEL --name all-MiniLM-L6-v2 [--out FILE]

Bands of freshly drawn kernels are narrow, and time measured with them is nobody's. This converts
the model as `tisa convert` does (its own heads, five kernels a head, nothing trained), fitted to
the demo's sentences, and writes amplitudes, sharpness and offsets of every layer. How long the
texts are decides how far bands reach: fitted to the built-in text in pieces of 512 tokens, half of
MiniLM's heads have one that reaches 1,770 offsets or more, which is no band below 2,048 tokens.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import tisa.hf
from tisa_lab.demo.sentences import TRAINING

OUT = Path(__file__).parent / "results/fitted-kernels.json"
NAMES = ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--name", required=True, help="what the model is called")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    model = transformers.AutoModel.from_pretrained(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    converted = tisa.hf.convert(model, tokenizer=tokenizer, calibration=list(TRAINING))
    layers = [m for m in converted.modules() if isinstance(m, tisa.TISA)]
    found = {n: [getattr(s, n).detach().tolist() for s in layers] for n in NAMES}
    ends = torch.cat([s.band(torch.bfloat16) for s in layers]).abs().amax(1).double()
    levels = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    record = {
        "date": datetime.now(UTC).date().isoformat(), "model": args.name,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "command": f"python3 benchmarks/fitted.py MODEL --name {args.name}",
        "what": "kernels fitted to its own heads on short sentences; (layers, heads, kernels)",
        "farthest end of a band in bfloat16: 10 %, median, 90 %, largest":
            ends.quantile(levels).tolist(),
    } | {n: [[[float(f"{x:.6g}") for x in h] for h in layer] for layer in v]
         for n, v in found.items()}  # fmt: skip
    args.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print({k: v for k, v in record.items() if k not in NAMES})


if __name__ == "__main__":
    main()
