"""A causal language model with a position method by name, on longer texts than it was trained on.

The "language" repeats itself: every token is the one that stood seven places before. Trained on 48
tokens, then asked for the next token in 384, as it stands: no method is told of the new length.
"""

import argparse

import torch

import tisa


def text(size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return sequences (size, length) of seven random tokens over and over."""
    beat = torch.randint(16, (size, 7), generator=generator)
    return beat.repeat(1, length // 7 + 1)[:, :length]


def main() -> None:
    """Train one model for each method and print the loss at both lengths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--positions", default="tisa,near-far,rotary", help="names, with commas")
    given = parser.parse_args()
    for name in given.positions.split(","):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = tisa.LanguageModel(
            tisa.TransformerConfig(
                vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                position=name, is_causal=True,
            )
        )  # fmt: skip
        is_score = {n: "scoring" in n for n, _ in model.named_parameters()}
        optimizer = torch.optim.Adam(
            [
                {"params": [p], "lr": 3e-2 if is_score[n] else 3e-3}
                for n, p in model.named_parameters()
            ]
        )

        def loss(length: int, size: int = 16, *, model=model, generator=generator) -> torch.Tensor:
            tokens = text(size, length + 1, generator)
            logits = model(tokens[:, :-1])[:, 7:]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 8:].flatten())

        for _ in range(given.steps):
            optimizer.zero_grad()
            loss(48).backward()
            optimizer.step()
        with torch.no_grad():
            print(f"{name:10} loss at 48 tokens {loss(48):.3f}, at 384 tokens {loss(384):.3f}")


if __name__ == "__main__":
    main()
