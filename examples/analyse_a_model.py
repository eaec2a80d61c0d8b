"""What a model knows about position, read from its weights alone.

Give a model by its folder or its name on the hub. Without one, a tiny BERT is made whose position
vectors are sines and cosines, which depend on distance alone: its R² is near 1.
"""

import argparse
import tempfile

import torch

import tisa.analysis


def tiny(folder: str) -> str:
    """Save a little BERT with sinusoidal positions and return its folder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=3,
            intermediate_size=16, max_position_embeddings=64,
        )
    )  # fmt: skip
    angles = torch.arange(64)[:, None] * 1000.0 ** -torch.linspace(0, 1, 12)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.copy_(
            torch.cat((angles.sin(), angles.cos()), 1)
        )
    model.save_pretrained(folder)
    return folder


def main() -> None:
    """Print how far the model's positions depend on distance alone, beside what chance gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; by default a tiny BERT made here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tisa.analysis.analyze(given.model or tiny(folder))
    if found.model is None or found.spectrum is None:
        print(f"{found.family}: no position table; {len(found.curves)} learned curves per head")
        return
    table, heads = found.invariance["table"], found.heads[0]
    rows, width = found.model.positions.shape
    print(f"{found.family}: a table of {rows} positions, {width} wide")
    print(f"Toeplitz R² of P: {table.r2:.3f}, chance gives {table.null.whole:.3f}")
    print(f"off the diagonal: {table.off_diagonal:.3f}, chance {table.null.off_diagonal:.3f}")
    print(f"{found.spectrum.dimensions()} of {width} dimensions hold 90 % of its variance")
    print(f"{sum(heads.sensitive)} of {len(heads.sensitive)} heads of layer 1 look at positions")


if __name__ == "__main__":
    main()
