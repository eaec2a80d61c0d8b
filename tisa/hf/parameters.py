"""Optimiser groups for a converted model: scores learn at their own rate and do not decay."""

from typing import Any

from torch import nn

NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "ln_f.weight")


def parameter_groups(
    model: nn.Module,
    *,
    lr: float = 5e-5,
    scores_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return groups for any optimiser: weights, weights without decay, scores.

    Args:
        model: a converted model, possibly inside others (peft, DDP).
        lr: rate of the model's own weights; by default that of transformers' `Trainer`.
        scores_lr: rate of kernels and folded vectors; by default 10 · `lr`: a kernel's place is
            measured in tokens, and a step of an embedding's size would not move it.
        weight_decay: of the weights, biases and norms aside. Scores never decay: decay would draw
            their place to the query and their width to the whole text.
    """
    scores = [p for n, p in model.named_parameters() if p.requires_grad and is_score(n)]
    if not scores:
        raise ValueError(
            "parameter_groups: no scores among the trainable parameters; convert the model with "
            "tisa.hf.convert, and leave them trainable"
        )
    own = 10 * lr if scores_lr is None else scores_lr
    return [
        *weight_groups(model, lr=lr, weight_decay=weight_decay),
        {"params": scores, "lr": own, "weight_decay": 0.0},
    ]


def weight_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return the groups of all but the scores: weights, and those that do not decay."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or is_score(name):
            continue
        plain = parameter.ndim < 2 or name.lower().endswith(NO_DECAY)
        (undecayed if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": undecayed, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def is_score(name: str) -> bool:
    """Return whether a parameter of this name belongs to the positions: scores, folded vectors."""
    return "offset_scores" in name or name.endswith(".fold")
