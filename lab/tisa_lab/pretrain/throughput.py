"""Work of a training step, and which share of the device's arithmetic it used."""

import torch

from tisa.transformer import TransformerConfig

# Dense bfloat16 products with float32 sums, FLOP/s, as the manufacturer states them.
PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12,
         "L40S": 362e12, "RTX 4090": 165e12}  # fmt: skip


def step_flops(config: TransformerConfig, tokens: int, labels: int, squares: int) -> float:
    """Return the floating-point operations of a step: 3 × those of its forward pass.

    Matrix products only, two operations for each multiplication, nothing for what is recomputed;
    `squares` is Σ (length of a piece)², of which a causal model needs half. Position methods with
    products of their own (Shaw, FLOATER) are counted like the others.
    """
    width, inner = config.hidden_size, config.feed_forward_size
    layer = 2 * (4 * width * width + 2 * width * inner)
    seen = squares / 2 if config.is_causal else squares
    attention = 4 * width * seen
    head = 2 * config.embedding_width * config.vocab_size
    if config.embedding_size is not None or not config.is_causal:
        head += 2 * width * config.embedding_width
    widen = 0 if config.embedding_size is None else 2 * width * config.embedding_size
    body = config.num_hidden_layers * (layer * tokens + attention) + widen * tokens
    return 3.0 * (body + head * labels)


def peak_flops(device: torch.device) -> float | None:
    """Return what the device can do in bfloat16, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
