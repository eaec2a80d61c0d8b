"""Fine-tune a converted model: the scores of the offset learn at a rate of their own.

The task needs word order: does token 5 stand before token 6? A bag of words cannot tell. The model
is a tiny random BERT whose position table is taken out; all it knows of order are its kernels.
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

import tisa.hf


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences with tokens 5 and 6 next to each other, and whether 5 is first."""
    tokens = torch.randint(7, 40, (size, 14), generator=generator)
    tokens[:, 0], tokens[:, -1] = 2, 3
    labels = torch.randint(2, (size,), generator=generator)
    places = torch.randint(1, 12, (size,), generator=generator)
    rows = torch.arange(size)
    tokens[rows, places], tokens[rows, places + 1] = 6 - labels, 5 + labels
    return tokens, labels


def main() -> None:
    """Train with kernels and without any positions, and print both accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    config = BertConfig(
        vocab_size=40, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    for name, kernels in (("TISA, 5 kernels per head", 5), ("no positions", 0)):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
        model = tisa.hf.convert(model, init="reference", fold=False, num_kernels=kernels)
        groups = tisa.hf.parameter_groups(model, lr=1e-3, scores_lr=2e-2, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups)
        generator = torch.Generator().manual_seed(1)
        model.train()
        for _ in range(steps):
            tokens, labels = batch(32, generator)
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        tokens, labels = batch(500, generator)
        with torch.no_grad():
            right = (model(input_ids=tokens).logits.argmax(-1) == labels).double().mean()
        print(f"{name}: {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
