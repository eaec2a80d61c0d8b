"""Packages that not everybody has installed: asked for where they are used, in one sentence."""

from importlib import import_module
from typing import Any


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
