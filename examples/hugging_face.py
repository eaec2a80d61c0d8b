"""A Hugging Face model without its position table: kernels fitted to its own heads instead.

Give a model by its folder or its name on the hub. Without one, a tiny random BERT shows the steps;
it never learned to use its positions, so look at a real one for numbers (docs/huggingface.md).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import tisa.hf


def tiny() -> BertModel:
    """Return a little BERT with random weights and sines and cosines as positions."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = BertModel(config).eval()
    angles = torch.arange(64)[:, None] * 100.0 ** -torch.linspace(0, 1, 16)
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    model.embeddings.position_embeddings.weight.data.copy_(waves)
    return model


def main() -> None:
    """Convert, save, load again, compare with the original."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; by default a tiny random BERT")
    parser.add_argument("--text", type=Path, help="file with one input per line, to fit on")
    given = parser.parse_args()
    if given.model is None:
        model, tokenizer = tiny(), None
        texts = [[2, *torch.randint(4, 60, (n,)).tolist(), 3] for n in range(6, 38)]
        inputs = {"input_ids": torch.tensor(texts[10:11])}
    else:
        model = AutoModel.from_pretrained(given.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        texts = given.text.read_text(encoding="utf-8").splitlines() if given.text else None
        inputs = tokenizer("The dog bit the man, not the man the dog.", return_tensors="pt")
    converted = tisa.hf.convert(
        model, positions="replace", init="fit", calibration=texts, tokenizer=tokenizer
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        converted.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder).eval()
        before, after = (m(**inputs).last_hidden_state for m in (model, loaded))
    closeness = torch.cosine_similarity(before, after, dim=-1).mean()
    print(f"cosine to the original, token by token: {closeness:.3f}")
    table = converted.config.tisa["replaced_parameters"]
    print(f"{type(loaded).__name__} without the {table:,} numbers of its position table")


if __name__ == "__main__":
    main()
