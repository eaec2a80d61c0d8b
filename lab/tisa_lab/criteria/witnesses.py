"""Settings of a method's own parameters that put a query's attention on one far key.

Every token is the zero vector, so that nothing but position can tell keys apart; the query and key
maps then give their biases, which are free, as are the weights. Nothing is added to the layer: a
witness is a point in the space in which the method is trained. Each function sets one for the
offset −`far` (the key stands before the query); one head is enough.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from tisa.positions.floater import Floater
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import TISA, NearFar, ScoringFunction, TISAv2
from tisa.transformer import SelfAttention

Scoring = TypeVar("Scoring", bound=ScoringFunction)

# Logits between the far key and its neighbours are at least about this.
SHARP = 40.0


def sinusoidal(layer: SelfAttention, far: int) -> None:
    """Queries see their own embedding turned back by `far` positions, keys as they are."""
    width, head = layer.position.config.hidden_size, layer.position.config.head_size
    query, key = _maps(layer)
    for one in range(0, head, 2):
        angle = far * 10000 ** (-one / width)
        key[one, one] = key[one + 1, one + 1] = SHARP
        # sin and cos of (p − far)·w out of those of p·w.
        query[one, one], query[one, one + 1] = math.cos(angle), -math.sin(angle)
        query[one + 1, one], query[one + 1, one + 1] = math.sin(angle), math.cos(angle)


def rotary(layer: SelfAttention, far: int) -> None:
    """Constant queries and keys, turned against each other by `far` positions' angles."""
    head = layer.position.config.head_size
    assert layer.attention.query is not None
    assert layer.attention.key is not None
    query, key = layer.attention.query.bias, layer.attention.key.bias
    for pair in range(head // 2):
        angle = far * 10000 ** (-2 * pair / head)
        key[pair] = SHARP
        # The key's rotation at offset −far undoes this one.
        query[pair], query[pair + head // 2] = math.cos(angle), -math.sin(angle)


def tisa(layer: SelfAttention, far: int) -> None:
    """One narrow kernel at −far."""
    _kernel(_scoring(layer, TISA), far)


def near_far(layer: SelfAttention, far: int) -> None:
    """One narrow kernel at −far and hardly any decay."""
    scoring = _scoring(layer, NearFar)
    _kernel(scoring.near, far)
    scoring.raw_strengths.fill_(-30.0)


def tisa_v2(layer: SelfAttention, far: int) -> None:
    """One sharp step up at −far in every head; only the fixed slope falls again beyond it.

    As high as float32, in which models are trained, can hold an amplitude.
    """
    scoring = _scoring(layer, TISAv2)
    scoring.step_amplitudes[:, 0] = math.exp(80.0)
    scoring.step_offsets[:, 0] = far - 0.5
    scoring.step_widths.fill_(1e-2)


def floater(layer: SelfAttention, far: int) -> None:
    """A flow whose vectors make −λ(t_j − t_i + τ)² of the two times, τ = far·Δt.

    dp/dt = b + w·t for every state, so p(t) = p(0) + b·t + w·t²/2. In the first dimension b = √2λ
    and the query starts at −√2λ·τ: 2λ·t_j·(t_i − τ). In the second the query's large start meets
    the key's small w·t²/2: −λ·t_j². What depends on t_i alone does not matter to a softmax.
    """
    position = layer.position
    assert isinstance(position, Floater)
    head = position.config.head_size
    strength = SHARP * math.sqrt(head) / position.step**2
    slope, curvature = math.sqrt(2 * strength), 1e-4
    flow = position.flow.second
    flow.bias[0] = slope
    flow.weight[1, -1] = curvature
    position.starts[0, 0, 0] = -slope * far * position.step
    position.starts[0, 0, 1] = -2 * strength / curvature


KNOWN: dict[str, Callable[[SelfAttention, int], None]] = {
    "sinusoidal": sinusoidal,
    "rotary": rotary,
    "tisa": tisa,
    "near-far": near_far,
    "tisa-v2": tisa_v2,
    "floater": floater,
}


# Why no gradient search is made beside the construction.
UNSEARCHED = {"floater": "one step of it solves the flow over all positions and back"}


def _maps(layer: SelfAttention) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.attention.query is not None
    assert layer.attention.key is not None
    return layer.attention.query.weight, layer.attention.key.weight


def _scoring(layer: SelfAttention, kind: type[Scoring]) -> Scoring:
    position = layer.position
    assert isinstance(position, FromScoring)
    scoring = position.scoring[0]
    assert isinstance(scoring, kind)
    return scoring


def _kernel(scoring: TISA, far: int) -> None:
    scoring.kernel_amplitudes.zero_()
    scoring.kernel_amplitudes[0, 0] = SHARP
    scoring.kernel_offsets[0, 0] = -far
    scoring.kernel_sharpness[0, 0] = 1.0
