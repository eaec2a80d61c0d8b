"""The original's position table at more places than it has, as others have made it longer.

With s = ⌈n / L⌉ for n places of a table of L: *interpolated* (PI) place p / s, *grouped* (GP)
⌊p / s⌋, *repeated* (RP) p mod L, as in Zhu et al., "LongEmbed" (EMNLP 2024). Scaled: logits are
multiplied by log n / log L, as attention over more keys is flatter (Chiang & Cholak, ACL 2022).
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from tisa.hf import families
from tisa.shapes import Float, Tensor

Kind = Literal["interpolated", "grouped", "repeated"]


def longer_rows(
    rows: Float[Tensor, "positions dim"], length: int, kind: Kind
) -> Float[Tensor, "length dim"]:
    """Return the vectors of so many places, made of those that there are."""
    limit = len(rows)
    scale = max(1, math.ceil(length / limit))
    places = torch.arange(length, device=rows.device)
    if kind == "repeated":
        return rows[places % limit]
    if kind == "grouped":
        return rows[places // scale]
    low = (places // scale).clamp(max=limit - 1)
    share = (places % scale / scale).to(rows.dtype).unsqueeze(1)
    return torch.lerp(rows[low], rows[(low + 1).clamp(max=limit - 1)], share)


def longer(model: PreTrainedModel, length: int, kind: Kind) -> PreTrainedModel:
    """Return a copy of a model with a learned table whose table has so many places."""
    made = copy.deepcopy(model)
    table = families.position_table(made)
    assert table is not None
    rows = longer_rows(families.table_rows(model), length, kind)
    before = table.embedding.weight.detach()[: table.first_row]
    found = nn.Embedding.from_pretrained(torch.cat([before, rows]))
    setattr(table.parent, table.name, found)
    made.config.max_position_embeddings = len(found.weight)
    return made


@contextmanager
def scaled(model: PreTrainedModel, factor: float) -> Iterator[None]:
    """Multiply all logits, and take it back."""
    modules = families.attention_modules(model)
    without = next((m for m in modules if not isinstance(getattr(m, "scaling", None), float)), None)
    if without is not None:
        raise ValueError(f"scaled: {type(without).__name__} has no scaling that could be changed")
    before = [module.scaling for module in modules]
    for module in modules:
        module.scaling = module.scaling * factor
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.scaling = value
