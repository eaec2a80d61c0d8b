"""What works on this machine: versions, devices, optional packages, and every backend tried out."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import tisa
from tisa.ops import attention
from tisa.ops.api import BACKENDS, HAS_TRITON
from tisa.scoring import TISA

# Distribution, and the extra of this package that asks for it.
OPTIONAL = {
    "triton": "with PyTorch on Linux with a GPU",
    "transformers": "hf",
    "accelerate": "hf",
    "safetensors": "hf",
    "huggingface_hub": "analysis",
    "matplotlib": "analysis",
}


@dataclass(frozen=True)
class Trial:
    """One training step of attention with scores, on one device with one backend."""

    device: str
    dtype: str
    backend: str
    works: bool
    # Why not; or, where it works, nothing.
    reason: str = ""


def examined() -> dict[str, Any]:
    """Return what is installed, which devices there are, and which backends work on them."""
    backends = [
        asdict(tried(device, dtype, backend))
        for device in _devices()
        for dtype in (torch.float32, torch.bfloat16)
        for backend in BACKENDS
    ]
    return {
        "versions": {
            "tisa": tisa.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in OPTIONAL},
        },
        "devices": {name: _described(name) for name in _devices()},
        "launches": launches(),
        "backends": backends,
    }


def launches() -> str:
    """Return how this process launches the fused backend's kernels, of those it has launched."""
    if not (torch.cuda.is_available() and HAS_TRITON):
        return "no GPU, or no Triton"
    from tisa.ops.triton import launching, native

    how = "; ".join(f"the long way: {why}" for why in launching.long_way) or "remembered"
    return f"{how}; in C++: {native.state}"


def tried(device: str, dtype: torch.dtype, backend: str) -> Trial:
    """Return whether a training step works there and gives what float64 gives."""
    kind = str(dtype).removeprefix("torch.")
    try:
        found = _gradients(torch.device(device), dtype, backend)
    # Whatever it is, it is what the user would meet.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Trial(device, kind, backend, False, reason)
    for ours, right in zip(
        found, _gradients(torch.device("cpu"), torch.float64, None), strict=True
    ):
        # Rounded inputs alone make up for this much; a backend that is wrong is wrong by more.
        allowed = 0.05 if dtype == torch.bfloat16 else 1e-3
        if not torch.allclose(ours.cpu().double(), right.double(), rtol=allowed, atol=allowed):
            return Trial(device, kind, backend, False, "gives other numbers than float64")
    return Trial(device, kind, backend, True)


def _gradients(
    device: torch.device, dtype: torch.dtype, backend: str | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query and kernels for a small input, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 17, 16, generator=generator).to(device, dtype).unbind()
    query.requires_grad_()
    scoring = TISA(2, 3)
    with torch.no_grad():
        for parameter in scoring.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    scoring.to(device)
    output = attention(query, key, value, scoring(17), backend=backend or "reference")
    assert isinstance(output, torch.Tensor)
    output.float().square().sum().backward()
    gradients = (query.grad, *(p.grad for p in scoring.parameters()))
    return tuple(g for g in gradients if g is not None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    if torch.xpu.is_available():
        found.append("xpu")
    return found


def _described(device: str) -> str:
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
    if device == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    return device
