"""all-mpnet-base-v2, the published model, fused: how far from float64, beside stock itself.

    PYTHONPATH=.:lab python3 benchmarks/fused_mpnet.py FOLDER [--out FILE]

FOLDER is the model's. States, the sentence embedding (mean of states, normed) and every gradient of
the sum of squares of the embeddings' differences, for the sentences that the package has, padded to
one length: of stock and of the fused model, in each dtype, against stock in float64.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import tisa
from tisa.hf.default_text import SENTENCES
from tisa_lab.record import command_line, surroundings


def answers(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return states, embeddings, and all gradients in one vector, in float64."""
    states = model(**given).last_hidden_state
    real = given["attention_mask"].unsqueeze(-1).to(states.dtype)
    states = states * real
    embedded = torch.nn.functional.normalize(states.sum(1) / real.sum(1), dim=-1)
    (embedded[1:] - embedded[:-1]).square().sum().backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    table = model.encoder.relative_attention_bias.weight.grad
    return {
        "states": states.detach().double(),
        "embeddings": embedded.detach().double(),
        "gradients": torch.cat(gradients),
        "gradient of the relative table": table.double(),
    }


def main() -> None:
    """Compare, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stock = transformers.AutoModel.from_pretrained(args.folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    given = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    exact = answers(copy.deepcopy(stock).double(), given)
    record: dict[str, Any] = surroundings(command_line(), torch.device("cpu"))
    record |= {"transformers": transformers.__version__, "model": args.folder.name}
    record |= {"batch": list(given["input_ids"].shape), "off": {}}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for name, make in (("stock", lambda m: m), ("fused", tisa.hf.fuse)):
            found = answers(make(copy.deepcopy(stock)).to(dtype), given)
            off = {
                what: float((found[what] - right).norm() / right.norm())
                for what, right in exact.items()
            }
            record["off"].setdefault(str(dtype).removeprefix("torch."), {})[name] = off
            print(dtype, name, {what: f"{error:.1e}" for what, error in off.items()}, flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
