"""A small model trained on inputs of any length up to one, and asked past it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tisa.parameters import grouped, of_scoring
from tisa.transformer import LanguageModel, TransformerConfig
from tisa_lab.probes.tasks import NO_ANSWER, Made

# A batch and a length in, inputs and answers out.
Make = Callable[[int, int, torch.Generator], Made]


@dataclass(frozen=True)
class Sizes:
    """Sizes and recipe of a model.

    Inputs in training have any length from half of `length` to `length`, the same for all rows of
    a step.

    Args:
        length: Tokens of the training inputs, at most.
        factors: The models are asked at the length times each factor.
        steps: Updates of each model.
        batch_size: Inputs of a step.
        hidden_size: Width.
        num_hidden_layers: Layers.
        num_attention_heads: Attention heads.
        learning_rate: The peak.
        scores_learning_rate: Of scores of the offset.
        asked: Inputs that are asked at each length.
        seed: Of weights and inputs.
    """

    length: int = 32
    factors: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 600
    batch_size: int = 32
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    learning_rate: float = 2e-3
    scores_learning_rate: float = 2e-2
    asked: int = 256
    seed: int = 0

    def check(self, *, shortest: int) -> None:
        """Refuse sizes that make no sense."""
        if self.length < shortest:
            raise ValueError(f"length must be at least {shortest}, got {self.length}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if 1 not in self.factors or min(self.factors) < 1:
            raise ValueError(f"factors must be 1 and whole numbers above it, got {self.factors}")

    def model(self, method: str, vocab_size: int, *, is_causal: bool = False) -> LanguageModel:
        """Return a new encoder, or decoder, with a position method."""
        return LanguageModel(
            TransformerConfig(
                vocab_size=vocab_size,
                hidden_size=self.hidden_size,
                num_hidden_layers=self.num_hidden_layers,
                num_attention_heads=self.num_attention_heads,
                max_position_embeddings=self.length,
                position=method,
                is_causal=is_causal,
            )
        )


def train(
    model: LanguageModel,
    config: Sizes,
    batch: Callable[[int, torch.Generator], Made],
    device: torch.device,
    *,
    beside: nn.Module | None = None,
) -> float:
    """Train a model on batches of half the length to the length; return the last loss.

    `beside` has parameters of its own, and says of a batch's tokens what else is a loss of the
    model's last pass.
    """
    groups = grouped(
        model, of_scoring(model), lr=config.learning_rate, scores_lr=config.scores_learning_rate
    )
    if beside is not None:
        groups.append({"params": list(beside.parameters()), "lr": config.learning_rate})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / config.steps)
    )
    generator = torch.Generator().manual_seed(config.seed + 1)
    loss = torch.zeros(())
    for _ in range(config.steps):
        shortest = config.length // 2
        drawn = torch.randint(shortest, config.length + 1, (), generator=generator)
        tokens, answers = batch(int(drawn), generator)
        tokens = tokens.to(device)
        loss = loss_of(model, tokens, answers.to(device))
        optimizer.zero_grad(set_to_none=True)
        (loss if beside is None else loss + beside(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    model.eval()
    return float(loss.detach())


def loss_of(model: LanguageModel, tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the places that have an answer."""
    there = answers != NO_ANSWER
    return cross_entropy(model.head(model.transformer(tokens)[there]), answers[there])


def answered(
    model: LanguageModel, config: Sizes, make: Make, device: torch.device
) -> dict[str, float | None]:
    """Return the share of right answers by factor; None where there are no places for a length."""
    shares = {}
    for factor in config.factors:
        generator = torch.Generator().manual_seed(10_000 + factor)
        length = factor * config.length
        shares[str(factor)] = ask(model, make, config.asked, length, generator, device)
    return shares


@torch.no_grad()
def ask(
    model: LanguageModel,
    make: Make,
    inputs: int,
    length: int,
    generator: torch.Generator,
    device: torch.device,
) -> float | None:
    """Return the share of right answers; None where the method has no places for the length."""
    limit = model.transformer.position.max_length
    if limit is not None and length > limit:
        return None
    right = total = 0
    for _ in range(0, inputs, 32):
        tokens, answers = (x.to(device) for x in make(32, length, generator))
        there = answers != NO_ANSWER
        said = model.head(model.transformer(tokens)[there]).argmax(-1)
        right += int((said == answers[there]).sum())
        total += int(there.sum())
    return right / total
