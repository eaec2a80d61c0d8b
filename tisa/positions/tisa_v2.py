"""TISA v2: soft steps and a fixed slope (the author of TISA, 2023)."""

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import TISAv2


class TISAv2Position(FromScoring):
    """`tisa.TISAv2` in every layer; the two fields of view are in tokens."""

    def __init__(
        self,
        config: PositionConfig,
        *,
        num_kernels: int = 5,
        shortest_view: float = 64.0,
        longest_view: float = 4096.0,
        num_agnostic_heads: int = 0,
        kernel_dropout: float = 0.0,
        layers: Layers = "each",
    ) -> None:
        super().__init__(
            config,
            lambda: TISAv2(
                config.num_attention_heads,
                num_kernels,
                shortest_view=shortest_view,
                longest_view=longest_view,
                num_agnostic_heads=num_agnostic_heads,
                kernel_dropout=kernel_dropout,
            ),
            layers=layers,
        )
