"""Parameter efficient: how many parameters position takes at BERT-base size."""

import torch

from tisa.transformer import Transformer, TransformerConfig
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings


def measure(name: str, settings: Settings) -> Measurement:
    """Return the positional parameters as a share of the others; refuted if they grow with n."""
    count, others = parameters(name, 512)
    longer, _ = parameters(name, 1024)
    share, grows = count / others, longer > count
    growing = f", {longer:,} for 1,024 positions" if grows else ", whatever the length"
    return Measurement(
        share,
        f"{count:,} positional parameters, {100 * share:.3g} % of the others{growing}",
        refuted=grows,
    )


def parameters(name: str, length: int) -> tuple[int, int]:
    """Return the positional parameters of BERT base with that method, and all others."""
    with torch.device("meta"):
        return Transformer(
            TransformerConfig(position=name, max_position_embeddings=length)
        ).num_parameters()
