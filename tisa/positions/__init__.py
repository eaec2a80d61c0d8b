"""How position enters a transformer: every method by name, one file each, one small interface.

  base.py          the interface: hooks at every place where position can enter
  from_scoring.py  methods that are a function of the offset, made of a scoring function
  angles.py        what sinusoidal and rotary embeddings have in common

`METHODS` names the others.
"""

import difflib
import inspect
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from tisa.positions.base import Places, Position, PositionConfig, Prepared, places_of


class Method(NamedTuple):
    """Where a method is, and the options that its name stands for."""

    file: str
    cls: str
    options: Mapping[str, Any] = MappingProxyType({})


# The names, fixed here and nowhere else.
METHODS: dict[str, Method] = {
    "none": Method("none.py", "NoPosition"),
    "sinusoidal": Method("sinusoidal.py", "Sinusoidal"),
    "absolute": Method("absolute.py", "Absolute"),
    "shaw": Method("shaw.py", "Shaw"),
    "t5": Method("t5.py", "T5Position"),
    "floater": Method("floater.py", "Floater"),
    "synthesizer-random": Method("synthesizer.py", "Synthesizer", {"form": "random"}),
    "synthesizer-factorised": Method("synthesizer.py", "Synthesizer", {"form": "factorised"}),
    "synthesizer-dense": Method("synthesizer.py", "Synthesizer", {"form": "dense"}),
    "synthesizer-random-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "random", "mixed": True}
    ),
    "synthesizer-factorised-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "factorised", "mixed": True}
    ),
    "synthesizer-dense-mixed": Method(
        "synthesizer.py", "Synthesizer", {"form": "dense", "mixed": True}
    ),
    "tupe-a": Method("tupe.py", "Tupe", {"relative": False}),
    "tupe-r": Method("tupe.py", "Tupe", {"relative": True}),
    "rotary": Method("rotary.py", "Rotary"),
    "tisa": Method("tisa.py", "TISAPosition"),
    "alibi": Method("alibi.py", "ALiBiPosition"),
    "kerple-log": Method("kerple.py", "KerplePosition", {"kernel": "log"}),
    "kerple-power": Method("kerple.py", "KerplePosition", {"kernel": "power"}),
    "tisa-v2": Method("tisa_v2.py", "TISAv2Position"),
    "near-far": Method("near_far.py", "NearFarPosition"),
}


def build_position(name: str, config: PositionConfig) -> Position:
    """Return the position method of that name, with `config.options` as its keyword arguments."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}? All: " if near else "take one of "
        raise ValueError(
            f"position must be the name of a method, got {name!r}; {meant}{', '.join(METHODS)}"
        )
    method = METHODS[name]
    cls = getattr(import_module(f"tisa.positions.{method.file.removesuffix('.py')}"), method.cls)
    known = set(inspect.signature(cls).parameters) - {"config", *method.options}
    unknown = sorted(set(config.options) - known)
    if unknown:
        raise ValueError(
            f"options of position {name!r} must be among {', '.join(sorted(known)) or 'none'}, "
            f"got {', '.join(unknown)}"
        )
    built: Position = cls(config, **method.options, **config.options)
    return built


__all__ = [
    "METHODS",
    "Places",
    "Position",
    "PositionConfig",
    "Prepared",
    "build_position",
    "places_of",
]
