"""What a distillation with a held-out check does to a fitted model, by length, and to kernels.

    python runs/conversion_distilled.py --data-dir DATA --date DATE --out RECORD.json


DATA as for `conversion_length.py`. Articles that are fitted and distilled on, that are checked and
that are measured are three parts. Measured are texts of so many tokens, and |f| at ±30 tokens.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from conversion import model_folder, timed, writer
from conversion_length import articles, train_pieces

import tisa.hf
from tisa.hf import measure
from tisa.hf.report import curves_of
from tisa_lab.record import commit

LENGTHS, REACH = (16, 128, 512), 30


def far(model) -> float:
    """Return the mean of |f| at both ends of the reach, over heads and layers."""
    return float(torch.stack(curves_of(model, REACH))[..., [0, -1]].abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--positions", default="replace,extend")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--texts", type=int, default=32, help="measured, of each length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--date", required=True)
    parser.add_argument("--commit", default="", help="where there is no repository")
    args = parser.parse_args()
    command = (
        f"python runs/conversion_distilled.py --positions {args.positions} --steps {args.steps} "
        f"--batch-tokens {args.batch_tokens} --texts {args.texts} --data-dir DATA "
        f"--date {args.date} --out RECORD"
    )
    write = writer(args.out, command, args.device, args.commit or commit(), date=args.date)
    folder = model_folder("minilm", args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    original = original.to(args.device)
    texts = articles(args.data_dir)
    measured, fitted, checked = texts[100:200], texts[:16], texts[16:24]
    found: dict = {"rows": []}
    for positions in args.positions.split(","):
        converted = tisa.hf.convert(
            original, positions=positions, fold_by="inputs", tokenizer=tokenizer,
            calibration=train_pieces(fitted, random.Random(3)),
        ).eval()  # fmt: skip
        told: list = []

        def tell(what, model=converted, positions=positions, **more) -> None:
            with torch.no_grad():
                by = measure.cosine_by_length(
                    model, original, tokenizer, measured, LENGTHS, most=args.texts
                )
            row = {"positions": positions, "what": what, "cosine by length": by, "far": far(model)}
            found["rows"].append(row | more)
            print(json.dumps(found["rows"][-1]), flush=True)
            write(found)

        tell("fitted")
        losses, wall, cpu = timed(
            lambda model=converted, told=told: tisa.hf.distil(
                model, original, fitted, held_out=checked, lengths=(8, LENGTHS[-1] - 2),
                steps=args.steps, batch_tokens=args.batch_tokens, tokenizer=tokenizer,
                progress=told.append,
            )
        )  # fmt: skip
        tell(
            "distilled", steps=len(losses), share=told[-1].share, held_out=told[-1].held_out,
            seconds=wall, processor_seconds=cpu,
        )  # fmt: skip


if __name__ == "__main__":
    main()
