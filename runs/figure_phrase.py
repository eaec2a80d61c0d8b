"""One phrase moved through a text: attention inside it, with a position table and with TISA.

    python runs/figure_phrase.py MODEL --out docs/figures/phrase.png
        --record docs/records/DATE-phrase.json [--converted FOLDER]

MODEL is a folder of all-MiniLM-L6-v2 (or another encoder with a learned table). Its copy with
kernels fitted to its own heads is made here, or read from a folder of `tisa convert`. The phrase is
put between the same other words at four places of an input of 256 tokens. Drawn is how each
of its words spreads the attention that it gives to the phrase (each row sums to 1), in the head of
the first and of the second layer whose attention moves most in the original. The record has every
head. The change is half the sum of absolute differences to the first place, mean over words.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
import torch
import transformers

import tisa.hf
from tisa.analysis.colours import BLUE, INK, ORANGE, PALE
from tisa.hf.calibration import default_texts
from tisa_lab.record import surroundings

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tisa.analysis.plots.style import STYLE

PHRASE = "the dog bit the man who fed the cat"
PLACES = (1, 40, 120, 230)
LENGTH = 256
DRAWN_LAYERS = (0, 1)


@torch.no_grad()
def inside(model, tokenizer) -> torch.Tensor:
    """Return attention inside the phrase, (places, layers, heads, words, words); rows sum to 1."""
    phrase = tokenizer(PHRASE, add_special_tokens=False).input_ids
    words = [t for text in default_texts()
             for t in tokenizer(text, add_special_tokens=False).input_ids]  # fmt: skip
    found = []
    for place in PLACES:
        around = words[: LENGTH - 2 - len(phrase)]
        ids = [tokenizer.cls_token_id, *around[: place - 1], *phrase, *around[place - 1 :],
               tokenizer.sep_token_id]  # fmt: skip
        weights = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)
        here = weights[:, 0, :, place : place + len(phrase), place : place + len(phrase)]
        found.append(here / here.sum(-1, keepdim=True))
    return torch.stack(found).double()


def change(attention: torch.Tensor) -> torch.Tensor:
    """Return how much differs from the first place (other places, layers, heads), from 0 to 1."""
    return (attention[1:] - attention[:1]).abs().sum(-1).mean(-1) / 2


def drawn_heads(attention: torch.Tensor) -> list[tuple[int, int]]:
    """Return (layer, head): in each drawn layer the head that moves most."""
    moved = change(attention).mean(0)
    return [(layer, int(moved[layer].argmax())) for layer in DRAWN_LAYERS]


def figure(found: dict[str, torch.Tensor], heads: list[tuple[int, int]]):
    """Return the drawing: a row for each model and head, a column for each place."""
    words = PHRASE.split()
    made = plt.figure(figsize=(9.6, 11.2), layout="constrained")
    grid = made.add_gridspec(len(heads) * 2 + 1, len(PLACES), height_ratios=[1] * 4 + [0.85])
    row = 0
    for layer, head in heads:
        highest = max(float(a[:, layer, head].max()) for a in found.values())
        for name, attention in found.items():
            moved = change(attention)[:, layer, head]
            for column, place in enumerate(PLACES):
                ax = made.add_subplot(grid[row, column])
                ax.imshow(
                    attention[column, layer, head].numpy(), cmap="viridis", vmin=0, vmax=highest
                )
                ax.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
                ax.set_yticks(range(len(words)), words if column == 0 else [], fontsize=7)
                ax.tick_params(length=0)
                if column == 0:
                    ax.set_ylabel(f"{name}\nlayer {layer + 1}, head {head + 1}", fontweight="bold")
                title = f"at token {place}"
                if column:
                    title += f": {100 * moved[column - 1]:.0f} % moved"
                ax.set_title(title, fontweight="normal", fontsize=9)
            row += 1
    ax = made.add_subplot(grid[row, :])
    layers = range(1, next(iter(found.values())).shape[1] + 1)
    for shift, (colour, (name, attention)) in enumerate(
        zip((ORANGE, BLUE), found.items(), strict=True)
    ):
        moved = 100 * change(attention).mean(0)
        at = [layer + 0.3 * shift - 0.15 for layer in layers]
        ax.bar(at, moved.mean(1), 0.26, color=colour, label=name)
        for x, values in zip(at, moved, strict=True):
            ax.plot([x] * len(values), values, ".", color=INK, markersize=3, alpha=0.6)
        for x, value in zip(at, moved.mean(1), strict=True):
            ax.text(x + 0.02, -1.2, f"{value:.0f}", ha="center", va="top", color=colour)
    ax.set(xticks=list(layers), xticklabels=[f"layer {n}" for n in layers], ylabel="% moved")
    ax.tick_params(axis="x", length=0, pad=12)
    ax.axhline(0, color=PALE, linewidth=0.8)
    ax.set_title("Mean of all heads (dots: each head), by layer")
    ax.legend(loc="upper left")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/phrase.png"))
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--converted", help="folder of `tisa convert`; by default fitted here")
    given = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    original = transformers.AutoModel.from_pretrained(given.model).eval()
    if given.converted:
        converted = transformers.AutoModel.from_pretrained(given.converted).eval()
    else:
        converted = tisa.hf.convert(
            original, positions="replace", init="fit", calibration=default_texts(),
            tokenizer=tokenizer,
        )  # fmt: skip
    found = {}
    for name, model in (("position table", original), ("TISA", converted)):
        model.set_attn_implementation("eager")
        found[name] = inside(model, tokenizer)
    heads = drawn_heads(found["position table"])
    with plt.rc_context(STYLE):
        figure(found, heads).savefig(given.out, dpi=100)
    command = "python runs/figure_phrase.py MODEL " + " ".join(
        a for a in sys.argv[1:] if a != given.model
    )
    record = {
        **surroundings(command, torch.device("cpu")),
        "transformers": transformers.__version__,
        "model": "all-MiniLM-L6-v2" if "minilm" in given.model.lower() else Path(given.model).name,
        "phrase": PHRASE,
        "places": PLACES,
        "length": LENGTH,
        "drawn": [{"layer": layer + 1, "head": head + 1} for layer, head in heads],
        "moved": {
            name: {
                "by_layer": change(a).mean((0, 2)).tolist(),
                "by_place_layer_head": change(a).tolist(),
                "largest_in_layer_1": float(change(a)[:, 0].max()),
            }
            for name, a in found.items()
        },
    }
    given.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({name: m["by_layer"] for name, m in record["moved"].items()}))


if __name__ == "__main__":
    main()
