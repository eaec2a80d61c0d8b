"""Interpretable: how much of what position adds to the logits can be read off a curve."""

from dataclasses import replace

import torch

from tisa.offsets import sum_diagonals, to_matrix
from tisa.positions import build_position
from tisa.shapes import Float, Tensor
from tisa.transformer import SelfAttention
from tisa_lab.criteria.draws import random_content, random_layer
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings


def measure(name: str, settings: Settings) -> Measurement:
    """Return the share of the positional logits' variance that a function of the offset explains.

    The function is free: for each draw of the parameters and each head the mean of its diagonal,
    over all contents. Chance alone would explain the number of offsets over that of logits.
    """
    residual = total = 0.0
    for draw in range(settings.draws):
        layer = random_layer(name, settings, draw)
        content = random_content(settings, settings.contents, settings.training_length, seed=draw)
        with torch.no_grad():
            added = positional_logits(layer, content)
        residual += float((added - _best_curve(added)).square().sum())
        total += float((added - added.mean((0, 2, 3), keepdim=True)).square().sum())
    if total == 0:
        return Measurement(None, "position adds nothing to the logits")
    share = 1 - residual / total
    length = settings.training_length
    chance = (2 * length - 1) / (settings.contents * length**2)
    return Measurement(
        share,
        f"a function of the offset explains {100 * share:.3g} % of the positional logits "
        f"(by chance {100 * chance:.2g} %)",
    )


def positional_logits(
    layer: SelfAttention, content: Float[Tensor, "batch length hidden"]
) -> Float[Tensor, "batch heads length length_"]:
    """Return the logits minus those of the content alone, as this layer weighs them."""
    logits = layer.logits(content)
    position = layer.position
    if not position.uses_content:
        return logits
    blank = build_position("none", replace(position.config, options={}))
    alone = SelfAttention(
        position.config.hidden_size, position.config.num_attention_heads, position=blank
    ).to(content)
    # Maps without biases are maps with biases of 0.
    none = {name: torch.zeros_like(p) for name, p in alone.attention.state_dict().items()}
    alone.attention.load_state_dict({**none, **layer.attention.state_dict()})
    if position.dense:
        # Its share of a mixture: what the method does to queries of the content logits.
        probe = content.new_ones(1, position.config.num_attention_heads, 1, 1)
        return logits - alone.logits(content) * position.content(layer.layer, probe)
    return logits - alone.logits(content)


def _best_curve(added: Float[Tensor, "batch heads n n_"]) -> Float[Tensor, "heads n n_"]:
    length = added.shape[-1]
    counts = sum_diagonals(torch.ones(length, length, dtype=added.dtype, device=added.device))
    return to_matrix(sum_diagonals(added.mean(0)) / counts, length, length)
