"""TISA in an attention of your own: one module and one argument more.

The layer below is an ordinary one. It learns to copy the token that stands three places before,
which no attention without positions can do, and its curve f(k) then has its peak at k = −3.
"""

import argparse

import torch
from torch import nn

import tisa


class Attention(nn.Module):
    """Self-attention with a score for every offset."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.scoring = tisa.TISA(heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, (batch, length, hidden) like its input."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        output = tisa.attention(*qkv, self.scoring)
        return self.out(output.transpose(1, 2).flatten(2))


def main() -> None:
    """Train the layer and print what it learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    embed, layer, answer = nn.Embedding(20, 32), Attention(32, 2), nn.Linear(32, 20)
    weights = [*embed.parameters(), *layer.qkv.parameters(), *layer.out.parameters()]
    optimizer = torch.optim.Adam(
        [
            {"params": [*weights, *answer.parameters()], "lr": 3e-3},
            # A kernel's place is measured in tokens: it needs larger steps than a weight.
            {"params": layer.scoring.parameters(), "lr": 5e-2},
        ]
    )
    for _ in range(steps):
        tokens = torch.randint(20, (32, 24))
        logits = answer(layer(embed(tokens)))[:, 3:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (logits.argmax(-1) == tokens[:, :-3]).double().mean()
    offsets = torch.arange(-8, 9)
    peaks = offsets[layer.scoring.scores(offsets).argmax(1)].tolist()
    print(f"{100 * right:.0f} % right; the heads' f(k) have their peaks at k = {peaks}")


if __name__ == "__main__":
    main()
