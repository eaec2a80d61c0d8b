"""Configs that were written before a default changed: what they meant, in today's options.

A saved model computes what it computed then, whatever a method's default is now.
"""

from collections.abc import Mapping
from typing import Any

# Since format 3 (2026-11-19) the defaults are those of the papers, and of the authors' code where
# a paper is silent (docs/methods.md).
BEFORE_3: Mapping[str, Mapping[str, Any]] = {
    "floater": {"biases": True},
    "kerple-log": {"layers": "each"},
    "kerple-power": {"layers": "each"},
    "tupe-r": {"variant": "before"},
}


def as_meant(config: Mapping[str, Any], format_: int) -> dict[str, Any]:
    """Return the values of a saved `TransformerConfig` with the options it took for granted."""
    values = dict(config)
    meant = BEFORE_3.get(values.get("position", ""), {}) if format_ < 3 else {}
    if meant:
        values["position_options"] = {**meant, **values.get("position_options", {})}
    return values
