"""Recall from far away: a small decoder for each method, asked at up to 16 × its training length.

Pairs of a key and a value stand anywhere among noise, and at the end every key comes again: what
was its value? To answer, a value must know the key right before it, and a key must find its value
at any distance. Only the first needs positions, and only the second reaches far.

- recall: `PAIRS` pairs. Who cannot tell which key a value follows is right about once in `PAIRS`. A
  decoder without positions can learn it, late: its mask shows where a token stands.
- passkey: one pair, asked of the same model, which never saw one alone. Its value is the only one,
  so content alone finds it: what is measured is whether it can still be seen.

Trained on the answers alone, small models stay where they answer with any of the values. So in
training, and only there, the first layer is asked for the token before, at every place; and the
embeddings begin larger, so that a layer's output does not drown the token's own
(docs/log.md has what else was tried).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

from tisa.packages import device_named
from tisa.positions import canonical, resolve
from tisa.shapes import Float, Int, Tensor
from tisa.transformer import LanguageModel
from tisa_lab.probes.race import RACERS
from tisa_lab.probes.tasks import NO_ANSWER, Made
from tisa_lab.probes.training import Sizes, answered, train
from tisa_lab.record import sources, surroundings

# Both are asked of one model; how many pairs there are.
PAIRS = 4
RECALLS = {"recall": PAIRS, "passkey": 1}
# Tokens: values, then keys, then noise.
VALUES, KEYS, NOISE = 16, 16, 16
SYMBOLS = VALUES + KEYS + NOISE
# How much larger the embeddings begin than in the other models here.
LARGER = 8.0
# Every method of the encoders' race, and the gates, which are for decoders alone.
DECODERS = (*RACERS, "fox", "cable", "near-far-fox")


@dataclass(frozen=True)
class RecallConfig(Sizes):
    """Sizes and recipe of every model."""

    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 3e-3
    scores_learning_rate: float = 3e-2

    def __post_init__(self) -> None:
        # Training begins at half of it, where every pair and question must have room.
        self.check(shortest=6 * PAIRS)


def pairs(batch: int, length: int, generator: torch.Generator, *, count: int = PAIRS) -> Made:
    """Return pairs among noise, then their keys in another order, whose values are the answers."""
    room = length - count
    # So many starts of two tokens each, anywhere, none over another.
    drawn = torch.rand(batch, room - count, generator=generator)
    starts = drawn.topk(count, dim=1).indices.sort(1).values + torch.arange(count)
    keys = VALUES + torch.rand(batch, KEYS, generator=generator).topk(count, dim=1).indices
    values = torch.randint(VALUES, (batch, count), generator=generator)
    order = torch.rand(batch, count, generator=generator).argsort(1)
    tokens = VALUES + KEYS + torch.randint(NOISE, (batch, length), generator=generator)
    tokens.scatter_(1, starts, keys).scatter_(1, starts + 1, values)
    tokens[:, room:] = keys.gather(1, order)
    answers = torch.full_like(tokens, NO_ANSWER)
    answers[:, room:] = values.gather(1, order)
    return tokens, answers


class Before(nn.Module):
    """What is asked of the first layer in training: at every place, the token before."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        config = model.config
        self.map = nn.Linear(config.hidden_size, config.vocab_size)
        self._hidden = torch.empty(0)
        model.transformer.blocks[0].register_forward_hook(self._keep)

    def forward(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Return the loss, at the model's last pass."""
        hidden = layer_norm(self._hidden, self._hidden.shape[-1:])[:, 1:]
        return cross_entropy(self.map(hidden).flatten(0, 1), tokens[:, :-1].flatten())

    def _keep(self, block: nn.Module, given: object, hidden: Tensor) -> None:
        self._hidden = hidden


def run_recall(
    config: RecallConfig,
    methods: tuple[str, ...] = DECODERS,
    *,
    device: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda method: None,
) -> dict[str, Any]:
    """Return the record: accuracy of each method, task and length; a name given twice runs once."""
    place = device_named(device)
    if not methods:
        raise ValueError("methods must be one or more, got none")
    chosen = {name: resolve(name, what="methods") for name in map(canonical, methods)}
    rows = []
    for name, one in chosen.items():
        progress(name)
        rows += [{"method": one.label} | row for row in run(config, name, place)]
    return {
        "kind": "recall",
        "config": asdict(config),
        "rows": rows,
        "sources": sources(chosen.values()),
        "surroundings": surroundings(command, place),
    }


def run(config: RecallConfig, method: str, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each task: accuracy by length, the last loss and the time of the model."""
    torch.manual_seed(config.seed)
    return learned(config.model(method, SYMBOLS, is_causal=True), config, device)


def learned(
    model: LanguageModel, config: RecallConfig, device: torch.device
) -> list[dict[str, Any]]:
    """Return the same for a new decoder of `SYMBOLS` tokens, which is trained."""
    began = time.monotonic()
    with torch.no_grad():
        model.transformer.embeddings.weight.mul_(LARGER)
    before = Before(model).to(device)
    model.to(device)

    def batch(length: int, generator: torch.Generator) -> Made:
        return pairs(config.batch_size, length, generator)

    loss = train(model, config, batch, device, beside=before)
    asked = {
        task: answered(model, config, partial(pairs, count=count), device)
        for task, count in RECALLS.items()
    }
    shared = {
        "loss": loss,
        "positional_parameters": model.transformer.num_parameters()[0],
        "seconds": time.monotonic() - began,
    }
    return [{"task": task, "accuracy": accuracy} | shared for task, accuracy in asked.items()]
