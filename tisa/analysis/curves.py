"""Learned curves f(k) that a model holds as such: T5-style tables, MPNet's, TISA's own kernels."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tisa.analysis.decoders import is_causal
from tisa.offsets import offset_range
from tisa.scoring import TISA, NearFar, ScoringFunction, T5Buckets
from tisa.shapes import Float, Int, Tensor
from tisa.weights import Checkpoint

# Parameter names by which a scoring function of this package is recognised in a checkpoint.
SCORING = {
    NearFar: ("near.kernel_amplitudes", "near.kernel_sharpness", "near.kernel_offsets",
              "raw_strengths", "raw_rates"),
    TISA: ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"),
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One set of learned scores: where it is, its offsets, f(k) per head, its kernels if any.

    name: the tensors' prefix in the checkpoint; label: the same for people.
    """

    name: str
    label: str
    offsets: Int[Tensor, " span"]
    scores: Float[Tensor, "heads span"]
    amplitude: Float[Tensor, "heads kernels"] | None = None
    sharpness: Float[Tensor, "heads kernels"] | None = None
    center: Float[Tensor, "heads kernels"] | None = None


def read_curves(checkpoint: Checkpoint, *, reach: int = 128) -> list[Curve]:
    """Return every learned curve of the model, in layer order.

    On offsets from −reach to reach; where attention is causal to 0, because later keys are masked.
    """
    found = [*_tables(checkpoint, reach), *_kernels(checkpoint, reach)]
    return sorted(found, key=lambda c: [int(p) if p.isdigit() else p for p in _split(c.name)])


def _split(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def _tables(checkpoint: Checkpoint, reach: int) -> list[Curve]:
    curves = []
    for name, _ in _matching(checkpoint.tensors, "relative_attention_bias.weight"):
        if "EncDecAttention" in name:
            continue  # T5's first files have one there, which no model adds to its logits.
        table = checkpoint.read(name)
        causal = is_causal(checkpoint.config, name)
        scoring = _buckets(checkpoint.config, table, bidirectional=not causal)
        prefix = name.removesuffix(".relative_attention_bias.weight")
        curves.append(_curve(prefix, scoring, reach, causal))
    return curves


def _buckets(config: Mapping[str, Any], table: Tensor, *, bidirectional: bool) -> T5Buckets:
    scoring = T5Buckets(
        table.shape[1],
        table.shape[0],
        int(config.get("relative_attention_max_distance", 128)),
        bidirectional=bidirectional,
    )
    with torch.no_grad():
        scoring.bucket_scores.copy_(table.T)
    return scoring


def _kernels(checkpoint: Checkpoint, reach: int) -> list[Curve]:
    curves: list[Curve] = []
    seen: set[str] = set()
    for kind, parameters in SCORING.items():
        for name, tensor in _matching(checkpoint.tensors, parameters[0]):
            prefix = name.removesuffix(parameters[0])
            names = [prefix + p for p in parameters]
            if set(names) & seen:
                continue
            lacking = [n for n in names if n not in checkpoint.tensors]
            if lacking and kind is NearFar:
                continue  # TISA's kernels alone, under names that end alike.
            if lacking:
                raise ValueError(
                    f"{checkpoint.name}: the tensor {lacking[0]!r} is missing; the file is "
                    "incomplete, download it again"
                )
            seen |= set(names)
            if tensor.ndim != 2:
                raise ValueError(
                    f"{checkpoint.name}: {name} must be (heads, kernels), got {tuple(tensor.shape)}"
                )
            scoring = kind(*tensor.shape)
            scoring.load_state_dict({p: checkpoint.read(prefix + p) for p in parameters})
            causal = is_causal(checkpoint.config, name)
            curves.append(_curve(prefix.rstrip(".") or "scores", scoring, reach, causal))
    return curves


def _curve(name: str, scoring: ScoringFunction, reach: int, causal: bool) -> Curve:
    offsets = offset_range(1 if causal else reach + 1, reach + 1)
    with torch.no_grad():
        scores = scoring.scores(offsets)
    if not isinstance(scoring, TISA):
        return Curve(name, _label(name), offsets, scores)
    return Curve(
        name,
        _label(name),
        offsets,
        scores,
        scoring.kernel_amplitudes.detach(),
        scoring.kernel_sharpness.detach(),
        scoring.kernel_offsets.detach(),
    )


def _label(name: str) -> str:
    """Return the layer (and, where a layer has several sets, the pass) that a name speaks of."""
    layer = re.search(r"(?:^|\.)(?:layers?|h|block|albert_layer_groups)\.(\d+)\.", name + ".")
    one_pass = re.search(r"offset_scores\.(\d+)$", name)
    side = [
        part for part in ("encoder", "decoder") if re.search(rf"^(?:\w+\.)?{part}\.block", name)
    ]
    words = [*side, f"layer {int(layer[1]) + 1}" if layer else "" if side else name]
    if one_pass and int(one_pass[1]):
        words.append(f"pass {int(one_pass[1]) + 1}")
    return " ".join(word for word in words if word)


def _matching(tensors: Mapping[str, Tensor], end: str) -> list[tuple[str, Tensor]]:
    return [(n, tensors[n]) for n in tensors if n == end or n.endswith("." + end)]
