"""How long the large form would take where there is no GPU, reckoned from one step of its model."""

import time
from collections.abc import Callable

import torch

from tisa.transformer import LanguageModel, TransformerConfig
from tisa_lab.compare.settings import CompareConfig, Sizes
from tisa_lab.view import spoken

BYTES = 256


def check_affordable(
    config: CompareConfig,
    methods: int,
    device: torch.device,
    *,
    asked: bool,
    progress: Callable[[str], None],
) -> None:
    """Refuse the large form without a GPU, unless the device was asked for: then tell the time."""
    if config.size != "large" or device.type != "cpu":
        return
    took = spoken(methods * seconds(config.sizes()))
    if not asked:
        raise ValueError(
            f"size must be small where there is no GPU, got large: its {methods} language models "
            f"alone would take about {took} here, reckoned from one step (device cpu does it all "
            "the same)"
        )
    progress(f"without a GPU: about {took} for the language models alone, reckoned from one step")


def seconds(sizes: Sizes) -> float:
    """Return the time of training one language model without positions here, from one row's."""
    model = LanguageModel(
        TransformerConfig(
            vocab_size=BYTES, hidden_size=sizes.hidden_size, position="none", is_causal=True,
            num_hidden_layers=sizes.num_hidden_layers, max_position_embeddings=sizes.length,
            num_attention_heads=sizes.num_attention_heads,
        )
    )  # fmt: skip
    row = torch.zeros(1, sizes.length, dtype=torch.long)
    took = []
    # The first allocates.
    for _ in range(2):
        began = time.perf_counter()
        model(row).square().mean().backward()
        took.append(time.perf_counter() - began)
    return took[-1] * sizes.batch_tokens / sizes.length * sizes.steps
