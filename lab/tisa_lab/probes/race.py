"""A small encoder for each method and task, trained at one length and asked at longer ones."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tisa.packages import device_named
from tisa.parameters import grouped, of_scoring
from tisa.positions import canonical, resolve
from tisa.transformer import LanguageModel, TransformerConfig
from tisa_lab.probes.tasks import NO_ANSWER, OFFSET, TASKS, VOCABULARY
from tisa_lab.record import sources, surroundings

RACERS = ("none", "absolute", "sinusoidal", "rotary", "t5", "alibi", "kerple-log", "tisa",
          "tisa-v2", "near-far")  # fmt: skip


@dataclass(frozen=True)
class ProbeConfig:
    """Sizes and recipe of every run of the race.

    Inputs in training have any length from half of `length` to `length`, the same for all rows of
    a step.

    Args:
        length: Tokens of the training inputs, at most.
        factors: Asked is at the length times each of these.
        steps: Updates of each method and task.
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

    def __post_init__(self) -> None:
        # Training begins at half of it, where *find* must have an answer.
        if self.length < 2 * (OFFSET + 1):
            raise ValueError(f"length must be at least {2 * (OFFSET + 1)}, got {self.length}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if 1 not in self.factors or min(self.factors) < 1:
            raise ValueError(f"factors must be 1 and whole numbers above it, got {self.factors}")


def run_race(
    config: ProbeConfig,
    methods: tuple[str, ...] = RACERS,
    tasks: tuple[str, ...] = tuple(TASKS),
    *,
    device: str | None = None,
    command: str = "",
    progress: Callable[[str, str], None] = lambda method, task: None,
) -> dict[str, Any]:
    """Return the record: accuracy of each method, task and length; a name given twice runs once."""
    place = device_named(device)
    methods = tuple(map(canonical, methods))
    chosen = {method: resolve(method, what="methods") for method in methods}
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(
            f"tasks: expected some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
        )
    if not methods:
        raise ValueError("methods must be one or more, got none")
    for one in chosen.values():
        one.check_encoder("methods")
    rows = []
    for task in dict.fromkeys(tasks):
        for method in dict.fromkeys(methods):
            progress(method, task)
            found = run(config, method, task, place)
            rows.append({"method": chosen[method].label, "task": task} | found)
    return {
        "kind": "probes",
        "config": asdict(config),
        "rows": rows,
        "sources": sources(chosen.values()),
        "surroundings": surroundings(command, place),
    }


def run(config: ProbeConfig, method: str, task: str, device: torch.device) -> dict[str, Any]:
    """Return accuracy by length, the last loss and the time of one model and one task."""
    began = time.monotonic()
    torch.manual_seed(config.seed)
    model = LanguageModel(
        TransformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.length,
            position=method,
        )
    ).to(device)
    groups = grouped(
        model, of_scoring(model), lr=config.learning_rate, scores_lr=config.scores_learning_rate
    )
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / config.steps)
    )
    generator = torch.Generator().manual_seed(config.seed + 1)
    loss = torch.zeros(())
    for _ in range(config.steps):
        shortest = config.length // 2
        drawn = torch.randint(shortest, config.length + 1, (), generator=generator)
        tokens, answers = TASKS[task](config.batch_size, int(drawn), generator)
        loss = loss_of(model, tokens.to(device), answers.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    model.eval()
    accuracy: dict[str, float | None] = {}
    for factor in config.factors:
        asked = torch.Generator().manual_seed(10_000 + factor)
        accuracy[str(factor)] = ask(model, config, task, factor * config.length, asked, device)
    return {
        "accuracy": accuracy,
        "loss": float(loss.detach()),
        "positional_parameters": model.transformer.num_parameters()[0],
        "seconds": time.monotonic() - began,
    }


def loss_of(model: LanguageModel, tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the places that have an answer."""
    there = answers != NO_ANSWER
    return cross_entropy(model.head(model.transformer(tokens)[there]), answers[there])


@torch.no_grad()
def ask(
    model: LanguageModel,
    config: ProbeConfig,
    task: str,
    length: int,
    generator: torch.Generator,
    device: torch.device,
) -> float | None:
    """Return the share of right answers; None where the method has no places for the length."""
    limit = model.transformer.position.max_length
    if limit is not None and length > limit:
        return None
    right = total = 0
    for _ in range(0, config.asked, 32):
        tokens, answers = (x.to(device) for x in TASKS[task](32, length, generator))
        there = answers != NO_ANSWER
        said = model.head(model.transformer(tokens)[there]).argmax(-1)
        right += int((said == answers[there]).sum())
        total += int(there.sum())
    return right / total
