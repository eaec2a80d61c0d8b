"""TISA: radial-basis scores of the offset (Wennberg & Henter, ACL 2021)."""

from tisa.positions.base import Layers, PositionConfig
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import TISA
from tisa.scoring.base import Init


class TISAPosition(FromScoring):
    """`tisa.TISA` in every layer, five kernels per head.

    ALBERT passes through one layer many times: one set of kernels per pass is `layers="each"`, one
    for all passes, the likelier reading of the paper, `layers="shared"`.
    """

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
            lambda: TISA(config.num_attention_heads, num_kernels, init=init),
            layers=layers,
        )
