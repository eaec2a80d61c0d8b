"""Optimiser groups: weights, weights that do not decay, and scores at a rate of their own.

`parameter_groups` is for converted models, whose scores are known by name; `of_scoring` finds those
of any other model.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from tisa.scoring import ScoringFunction

# Of models whose norms have two axes, or other names.
NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "ln_f.weight")


def grouped(
    model: nn.Module,
    is_score: Callable[[str, nn.Parameter], bool],
    *,
    lr: float,
    scores_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters, in this order, those that are empty left out.

    Scores learn by default at 10 · `lr`: a kernel's place is measured in tokens, and a step of an
    embedding's size would not move it. They never decay: decay would draw their place to the query
    and their width to the whole text.
    """
    found: tuple[list[nn.Parameter], ...] = ([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = parameter.ndim < 2 or name.lower().endswith(NO_DECAY)
            found[2 if is_score(name, parameter) else int(plain)].append(parameter)
    rates = (lr, lr, 10 * lr if scores_lr is None else scores_lr)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay}
        for parameters, rate, decay in zip(found, rates, (weight_decay, 0.0, 0.0), strict=True)
        if parameters
    ]


def of_scoring(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    """Return what tells the parameters of scoring functions from a model's others."""
    scores = {p for m in model.modules() if isinstance(m, ScoringFunction) for p in m.parameters()}
    return lambda _, parameter: parameter in scores


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
        scores_lr: rate of kernels and position vectors; by default 10 · `lr`: a kernel's place is
            measured in tokens, and a step of an embedding's size would not move it.
        weight_decay: of the weights, biases and norms aside. Scores never decay: decay would draw
            their place to the query and their width to the whole text.
    """
    if not any(p.requires_grad and is_score(n) for n, p in model.named_parameters()):
        raise ValueError(
            "parameter_groups: no scores among the trainable parameters; convert the model with "
            "tisa.hf.convert, and leave them trainable"
        )
    return grouped(model, _of_scores, lr=lr, scores_lr=scores_lr, weight_decay=weight_decay)


def weight_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return the groups of all but the scores: weights, and those that do not decay."""
    groups = grouped(model, _of_scores, lr=lr, weight_decay=weight_decay)
    scores = {id(p) for n, p in model.named_parameters() if is_score(n)}
    return [group for group in groups if id(group["params"][0]) not in scores]


def is_score(name: str) -> bool:
    """Return whether a parameter of this name belongs to the positions: scores, or vectors."""
    return "offset_scores" in name or is_vector(name)


def is_vector(name: str) -> bool:
    """Return whether it holds vectors in the place of a position table: folded ones, or places."""
    return name.endswith((".fold", ".places"))


def _of_scores(name: str, parameter: nn.Parameter) -> bool:
    return is_score(name)
