"""A layer's training step with each method: in turns, the fastest of many, beside no positions."""

import time
from collections.abc import Callable, Iterable

import torch

from tisa.positions import Given, resolve
from tisa.transformer import SelfAttention

HIDDEN, HEADS = 256, 4


def step_of(
    position: Given, length: int, device: torch.device, *, is_causal: bool = False
) -> Callable[[], float]:
    """Return what takes one step, forward and backward, and returns its seconds."""
    torch.manual_seed(0)
    layer = SelfAttention(
        HIDDEN, HEADS, position=position, max_position_embeddings=length, is_causal=is_causal
    ).to(device)  # fmt: skip
    hidden = torch.randn(1, length, HIDDEN, device=device)

    def step() -> float:
        _wait(device)
        began = time.perf_counter()
        layer(hidden).square().mean().backward()
        _wait(device)
        return time.perf_counter() - began

    return step


def times(
    methods: Iterable[str], length: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Return each method's time as a multiple of that without positions.

    What is for decoders alone is timed in one, and beside one.
    """
    causal = {method: resolve(method).causal_only is not None for method in methods}
    every = {("none", False), *(("none", is_causal) for is_causal in causal.values())}
    steps = {
        (method, is_causal): step_of(method, length, device, is_causal=is_causal)
        for method, is_causal in sorted(every | set(causal.items()))
    }
    fastest = dict.fromkeys(steps, float("inf"))
    # The first round is not counted: it allocates, and compiles where something does.
    for number in range(rounds + 1):
        for kind, step in steps.items():
            seconds = step()
            if number:
                fastest[kind] = min(fastest[kind], seconds)
    causal["none"] = False
    return {m: fastest[m, kind] / fastest["none", kind] for m, kind in causal.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
