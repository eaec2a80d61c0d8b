"""KERPLE: learned logarithmic and power decays with distance (Chi et al., NeurIPS 2022)."""

from typing import Literal

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import KerpleLog, KerplePower


class KerplePosition(FromScoring):
    """`tisa.KerpleLog` or `tisa.KerplePower` in every layer, as the authors' code has it."""

    def __init__(
        self,
        config: PositionConfig,
        *,
        kernel: Literal["log", "power"] = "log",
        layers: Layers = "each",
    ) -> None:
        if kernel not in ("log", "power"):
            raise ValueError(f'KerplePosition: kernel must be "log" or "power", got {kernel!r}')
        scoring = KerpleLog if kernel == "log" else KerplePower
        super().__init__(config, lambda: scoring(config.num_attention_heads), layers=layers)
