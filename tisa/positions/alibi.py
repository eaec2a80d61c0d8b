"""ALiBi: a fixed linear penalty on distance (Press et al., ICLR 2022)."""

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import ALiBi


class ALiBiPosition(FromScoring):
    """`tisa.ALiBi` in every layer: the same fixed slopes, no parameters."""

    def __init__(self, config: PositionConfig, *, layers: Layers = "shared") -> None:
        super().__init__(config, lambda: ALiBi(config.num_attention_heads), layers=layers)
