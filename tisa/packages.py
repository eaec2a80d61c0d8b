"""What this machine has: optional packages, and where to compute."""

from importlib import import_module
from typing import Any

import torch


def needed(module: str, what: str, install: str) -> Any:
    """Return the module; where it is not installed, an error says what needs it and what brings it.

    needed("matplotlib.pyplot", "figures", "tisa[analysis]")
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or package).partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{what}: needs the package {package}, which is not installed; pip install '{install}'",
            name=missing.name,
        ) from None


def device_named(name: str | torch.device | None = None) -> torch.device:
    """Return the device of that name, which this machine has; for None a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    # Torch says it with a RuntimeError or an AssertionError, by the kind of device.
    except (RuntimeError, AssertionError) as wrong:
        first = str(wrong).splitlines()[0].split(" device type at start")[0]
        raise ValueError(
            f"device must be one that this machine has, such as cpu, got {str(name)!r} ({first})"
        ) from None
    return torch.device(name)
