"""T5: one learned score per bucket of offsets (Raffel et al., JMLR 2020)."""

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import T5Buckets
from tisa.scoring.base import Init


class T5Position(FromScoring):
    """`tisa.T5Buckets`, one table shared by all layers as published; causal buckets in a decoder.

    T5 itself does not scale its logits; here they are scaled by 1/√d as in every other method.
    """

    def __init__(
        self,
        config: PositionConfig,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        init: Init = "reference",
        layers: Layers = "shared",
    ) -> None:
        super().__init__(
            config,
            lambda: T5Buckets(
                config.num_attention_heads,
                num_buckets,
                max_distance,
                bidirectional=not config.is_causal,
                init=init,
            ),
            layers=layers,
        )
