"""Made-up tasks of the three kinds in GLUE's own files, and a tiny model that can read them."""

import random

import torch
import transformers

from tisa_lab.glue.cell import Cell

LETTERS = "abcdefgh"
WORDS = [x + y for x in LETTERS for y in LETTERS]


def sentence(generator, low=3, high=9):
    return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))


def write(path, lines, header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [] if header is None else [header]
    path.write_text("\n".join("\t".join(row) for row in rows + lines) + "\n", encoding="utf-8")


def make_data(folder, rows=24):
    """Write CoLA (one sentence), RTE (pairs) and STS-B (regression); return the folder."""
    generator = random.Random(0)
    for name, count in (("train", rows), ("dev", 10)):
        lines = [
            ["xx", str(i % 2), "*" if i % 3 else "", sentence(generator)] for i in range(count)
        ]
        write(folder / "CoLA" / f"{name}.tsv", lines)
        lines = [
            [str(i), sentence(generator), sentence(generator),
             ("entailment", "not_entailment")[i % 2]]
            for i in range(count)
        ]  # fmt: skip
        write(folder / "RTE" / f"{name}.tsv", lines, ["index", "sentence1", "sentence2", "label"])
        header = ["index", "genre", "filename", "year", "old_index", "source1", "source2",
                  "sentence1", "sentence2", "score"]  # fmt: skip
        lines = [
            [str(i), *"gfyoss", sentence(generator), sentence(generator), f"{5 * i / count:.3f}"]
            for i in range(count)
        ]
        write(folder / "STS-B" / f"{name}.tsv", lines, header)
    return folder


def changed(cell, **values):
    """Return a cell with other values, each by its own name."""
    return Cell.of(**{**cell.values(), **values})


def make_model(folder):
    """Write a tiny random BERT with its tokenizer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=32)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = transformers.BertModel(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6.0)
    model.save_pretrained(folder)
    return folder
