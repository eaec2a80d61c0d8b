"""What scores are fitted to: a layer's attention, and where its curves must stand far away.

A softmax does not see a head's constant, and kernels are 0 far away: a curve that is fitted up to a
constant may stand anywhere, and go to 0 where the offsets seen end. So the constant is chosen such
that the curve's far ends stand at 0, and `Anchor` holds them there and beyond.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tisa.hf.calibration import Batch
from tisa.shapes import Bool, Float, Int, Tensor

TABLE_STEPS = 100
# An end of the curve: the outermost offsets of a side, with so much of its pairs of tokens.
END = 0.1
# Where the curve must still be as at its end, in multiples of the last offset seen.
BEYOND = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.0, 4.0)
# What a squared deviation of 1 costs there, in divergence.
HOLD = 0.03


class Anchor(NamedTuple):
    """What a head's curve must be at the far ends of the offsets seen and beyond them."""

    offsets: Int[Tensor, " places"]
    level: Float[Tensor, "heads places"]
    weights: Float[Tensor, "heads places"]

    def cost(self, curve: Float[Tensor, "heads places"]) -> Float[Tensor, " heads"]:
        """Return what each head's deviation costs, of a curve at these offsets."""
        return (self.weights * (curve - self.level) ** 2).sum(-1)


class Aim:
    """One layer's attention: the original's weights, the converted model's bare logits."""

    def __init__(self, content: list[Tensor], target: list[Tensor], batches: list[Batch]) -> None:
        self.parts = []
        self.length = max(t.shape[-1] for t in target)
        total = sum(int(b.valid.sum()) for b in batches)
        heads = content[0].shape[1]
        self.mass = content[0].new_zeros(heads, 2 * self.length - 1)
        self.constant = content[0].new_zeros(heads)
        self.pairs = content[0].new_zeros(2 * self.length - 1)
        for logits, weights, batch in zip(content, target, batches, strict=True):
            keys = torch.arange(logits.shape[-1], device=logits.device)
            entries = keys - batch.rows[:, None] + (self.length - 1)
            share = batch.valid[:, None, :].to(logits.dtype) / total
            weights = weights * share.unsqueeze(-1)
            self.parts.append((logits, entries, share))
            self.mass.index_add_(1, entries.flatten(), weights.sum(0).flatten(1))
            known = (weights / share.unsqueeze(-1).clamp_min(1e-30)).clamp_min(1e-12).log()
            self.constant += (weights * (known - logits)).sum((0, 2, 3))
            real = (logits[:, 0] > -1e29) * share[:, 0, :, None]
            self.pairs.index_add_(0, entries.flatten(), real.sum(0).flatten())

    @property
    def offsets(self) -> Int[Tensor, " span"]:
        """Return the offsets of a curve."""
        return torch.arange(-(self.length - 1), self.length, device=self.mass.device)

    def divergence(
        self, curve: Float[Tensor, "heads span"]
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, "heads span"]]:
        """Return each head's KL divergence and its gradient by the curve.

        With A the original's weights and Z = logits + curve it is ΣA·(ln A − Z) + Σ ln Σ exp Z. Of
        the curve only the mass that A has at each offset matters in the first sum, and the
        gradient is the difference of the masses.
        """
        loss = self.constant - (self.mass * curve).sum(-1)
        gradient = -self.mass
        for logits, entries, share in self.parts:
            scored = logits + curve[:, entries]
            total = scored.logsumexp(-1)
            loss = loss + (share * total).sum((0, 2))
            found = scored.sub_(total.unsqueeze(-1)).exp_().mul_(share.unsqueeze(-1))
            gradient.index_add_(1, entries.flatten(), found.sum(0).flatten(1))
        return loss, gradient

    def best_curve(self) -> Float[Tensor, "heads span"]:
        """Return the free curve of least divergence, by Adam with a falling rate."""
        curve = torch.zeros_like(self.mass)
        descend([curve], lambda: [self.divergence(curve)[1]], TABLE_STEPS, [0.2])
        return curve

    def anchored(
        self, curve: Float[Tensor, "heads span"]
    ) -> tuple[Float[Tensor, "heads span"], Anchor]:
        """Return the curve with its far ends at 0, by the attention they carry, and its anchor.

        Ends of different height cannot both be 0; each is held where it is for as long as broad
        kernels can.
        """
        # Offsets without any attention count a little, by the pairs of tokens that have them.
        carried = self.mass + 1e-3 * self.pairs / self.pairs.sum()
        ends = [end for side in (-1, 1) if (end := self._end(side)).any()]
        shares = [torch.where(end, carried, 0.0) for end in ends]
        carried = sum(shares, torch.zeros_like(carried))
        curve = curve - (carried * curve).sum(-1, keepdim=True) / carried.sum(-1, keepdim=True)
        places, levels, weights = [], [], []
        for end, share in zip(ends, shares, strict=True):
            share = share[:, end] / share.sum(-1, keepdim=True)
            level = (share * curve[:, end]).sum(-1, keepdim=True)
            seen = self.offsets[end]
            last = int(seen[seen.abs().argmax()])
            beyond = torch.tensor([last * m for m in BEYOND], device=seen.device).round().long()
            places += [seen, beyond]
            levels.append(level.expand(-1, len(seen) + len(beyond)))
            weights += [share, torch.full_like(level, 1 / len(beyond)).expand(-1, len(beyond))]
        anchor = Anchor(torch.cat(places), torch.cat(levels, 1), HOLD * torch.cat(weights, 1))
        return curve, anchor

    def _end(self, side: int) -> Bool[Tensor, " span"]:
        """Return which offsets are the outermost of a side (−1: keys before the query)."""
        outwards = side * self.offsets
        seen = torch.where(outwards > 0, self.pairs, 0.0)
        further = seen.flip(0).cumsum(0).flip(0) if side > 0 else seen.cumsum(0)
        return (seen > 0) & (further - seen < END * seen.sum())


def descend(
    parts: list[Tensor],
    gradients: Callable[[], list[Tensor]],
    steps: int,
    rates: list[float],
    after: Callable[[], None] = lambda: None,
) -> None:
    """Take Adam steps in place, with rates that fall to a fiftieth."""
    groups = [{"params": [part], "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-7)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.98 * step / steps)
        for part, gradient in zip(parts, gradients(), strict=True):
            part.grad = gradient
        optimizer.step()
        after()
    for part in parts:
        part.grad = None
