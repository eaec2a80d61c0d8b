"""Several methods in one transformer, layer by layer, as in "rotary:base=160000+none"."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tisa.positions.base import Places, Position, PositionConfig, Prepared
from tisa.positions.naming import Chosen, build
from tisa.shapes import Int32, Tensor


class Mixture(Position):
    """A method for each layer: `members` in turn, and again from the first.

    Layers of the same method with the same options share one `Position`, in `methods`, which knows
    of these layers alone: parameters of each layer are of each of them, shared ones are shared
    between them. Hooks are those of `member(layer)`; a transformer asks no others. A method that
    enters at the input embeddings belongs to no layer, and is refused.
    """

    def __init__(self, config: PositionConfig, *, members: tuple[Chosen, ...]) -> None:
        super().__init__(config)
        count = config.num_hidden_layers
        if len(members) > count:
            raise ValueError(
                f"Mixture: position must name at most as many methods as layers, {count}, got "
                f"{len(members)}: {'+'.join(member.label for member in members)}"
            )
        labels = [members[layer % len(members)].label for layer in range(count)]
        self.labels = list(dict.fromkeys(labels))
        chosen = {member.label: member for member in members}
        self.methods = nn.ModuleList(
            build(chosen[label], replace(config, num_hidden_layers=labels.count(label), options={}))
            for label in self.labels
        )
        # Of each layer: which method, and the how-manieth of its layers.
        self._members = [
            (self.labels.index(label), labels[:layer].count(label))
            for layer, label in enumerate(labels)
        ]
        for label, method in zip(self.labels, self._positions(), strict=True):
            if type(method).embed is not Position.embed:
                raise ValueError(
                    f"Mixture: position must be of methods that enter in a layer, got {label}, "
                    "which is added to the input embeddings before all of them"
                )
        limits = [p.max_length for p in self._positions() if p.max_length is not None]
        self.max_length = min(limits, default=None)
        self.dense = any(p.dense for p in self._positions())
        self.needs_weights = any(p.needs_weights for p in self._positions())
        self.scores_keys = any(p.scores_keys for p in self._positions())

    def _positions(self) -> list[Position]:
        found = list(self.methods)
        assert all(isinstance(method, Position) for method in found)
        return found  # type: ignore[return-value]

    def member(self, layer: int) -> tuple[Position, int]:
        """Return the method of a layer, and the layer's number among those of that method."""
        number, own = self._members[layer]
        return self._positions()[number], own

    def prepared(self, layer: int, prepared: Prepared) -> Prepared:
        """Return what the layer's method computed for the pass."""
        found: Prepared = prepared.shared[self._members[layer][0]]
        return found

    def shared(self, places: Places) -> tuple[Prepared, ...]:
        """Return what every method computed for the pass."""
        return tuple(method.prepare(places) for method in self._positions())

    def is_dense(self, layer: int, prepared: Prepared) -> bool:
        """Return whether the layer's method has logits of every pair in this pass."""
        method, own = self.member(layer)
        return method.is_dense(own, self.prepared(layer, prepared))

    def bands(self, dtype: torch.dtype) -> list[Int32[Tensor, "heads 2"] | None]:
        """Return the band of every layer, made for all layers of a method together."""
        made = [method.bands(dtype) for method in self._positions()]
        return [made[number][own] for number, own in self._members]

    def vectors(self) -> Tensor | None:
        """Return the learned vectors of positions of the first method that has some."""
        found: Any = (method.vectors() for method in self._positions())
        return next((vectors for vectors in found if vectors is not None), None)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"layers={[self.labels[number] for number, _ in self._members]}"
