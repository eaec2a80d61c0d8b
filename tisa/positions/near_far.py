"""Near and far: TISA's kernels with a decay that holds distant tokens down. Our own."""

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import NearFar
from tisa.scoring.base import Init


class NearFarPosition(FromScoring):
    """`tisa.NearFar` in every layer."""

    def __init__(
        self,
        config: PositionConfig,
        *,
        num_kernels: int = 5,
        init: Init = "reference",
        layers: Layers = "each",
    ) -> None:
        super().__init__(
            config,
            lambda: NearFar(config.num_attention_heads, num_kernels, init=init),
            layers=layers,
        )
