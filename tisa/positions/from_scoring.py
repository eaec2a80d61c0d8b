"""Position methods that are a function of the offset: a scoring function per layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared
from tisa.scoring import ScoringFunction, bands_of, scores_of
from tisa.shapes import Int32, Scores, Tensor


class FromScoring(Position):
    """Scores f(key − query) added to the logits of every layer, through `tisa.attention`.

    Parameters: `scoring`, one function of the class `function` for each layer (`layers="each"`),
    one for all ("shared"), or one for the first layer, the others having no positions ("first").
    `options` are keyword arguments of `function`, `decoder` those that a causal model adds.
    """

    def __init__(
        self,
        config: PositionConfig,
        *,
        function: type[ScoringFunction],
        decoder: Mapping[str, Any] | None = None,
        layers: Layers = "each",
        **options: Any,
    ) -> None:
        super().__init__(config, layers=layers)
        if config.is_causal and decoder:
            options |= decoder
        self.scoring = nn.ModuleList(
            function(config.num_attention_heads, **options) for _ in range(self.copies)
        )

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the authors' checkpoint, one function of theirs for one of ours."""
        if len(self.scoring) > 1:
            raise ValueError(
                f"{type(self.scoring[0]).__name__}.from_reference: layers must be "
                f'"shared" or "first", got {self.layers!r}: the authors have one function for '
                'all layers; give the option layers="shared"'
            )
        (scoring,) = self.scoring
        assert isinstance(scoring, ScoringFunction)
        scoring.read_reference(state_dict)

    def shared(self, places: Places) -> list[Scores]:
        """Return the score vector of every scoring function."""
        return scores_of(self.scoring, places.queries, places.keys, query_start=places.query_start)

    def offset_scores(self, layer: int, prepared: Prepared) -> Scores | None:
        """Return the score vector of the layer."""
        copy = self.copy_of(layer)
        return None if copy is None else prepared.shared[copy]

    def band(self, layer: int, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the band of the layer's scoring function."""
        copy = self.copy_of(layer)
        return None if copy is None else bands_of([self.scoring[copy]], dtype)[0]

    def bands(self, dtype: torch.dtype) -> list[Int32[Tensor, "heads 2"] | None]:
        """Return the band of every layer's scoring function, made for all of them together."""
        made = bands_of(self.scoring, dtype)
        copies = map(self.copy_of, range(self.config.num_hidden_layers))
        return [None if copy is None else made[copy] for copy in copies]
