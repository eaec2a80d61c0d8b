"""How position enters a transformer: every method by name, one small interface.

  base.py          the interface: hooks at every place where position can enter
  from_scoring.py  methods that are a function of the offset: any function of `tisa/scoring/`
  published.py     weights that the authors of a method published, in our modules
  angles.py        what sinusoidal and rotary embeddings have in common

`METHODS` names the others, and which function of the offset a name stands for.
"""

import difflib
import inspect
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from tisa import scoring
from tisa.positions.base import Layers, Places, Position, PositionConfig, Prepared, places_of


class Method(NamedTuple):
    """Where a method is, the options that its name stands for, and other defaults than its own."""

    file: str
    cls: str
    options: Mapping[str, Any] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})

    def known(self, cls: type[Position]) -> set[str]:
        """Return the names of the options that a user may give."""
        names = set(inspect.signature(cls).parameters) - {"config", "options", *self.options}
        if "function" in self.options:
            names |= set(inspect.signature(self.options["function"]).parameters)
            names -= {"num_attention_heads", *self.options["decoder"]}
        return names


def _of_offset(
    function: type[scoring.ScoringFunction],
    *,
    layers: Layers = "each",
    decoder: Mapping[str, Any] = MappingProxyType({}),
) -> Method:
    """Return the method that adds this function of the offset in every layer."""
    fixed = {"function": function, "decoder": decoder}
    return Method("from_scoring.py", "FromScoring", fixed, {"layers": layers})


# The names, fixed here and nowhere else.
METHODS: dict[str, Method] = {
    "none": Method("none.py", "NoPosition"),
    "sinusoidal": Method("sinusoidal.py", "Sinusoidal"),
    "absolute": Method("absolute.py", "Absolute"),
    "shaw": Method("shaw.py", "Shaw"),
    # One table for all layers as published. T5 itself does not scale its logits; here all do.
    "t5": _of_offset(scoring.T5Buckets, layers="shared", decoder={"bidirectional": False}),
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
    # Its formula is one and the same in the paper and in the code.
    "tupe-a": Method("tupe.py", "Tupe", {"relative": False, "variant": "author"}),
    "tupe-r": Method("tupe.py", "Tupe", {"relative": True}),
    "rotary": Method("rotary.py", "Rotary"),
    # ALBERT passes through one layer many times: kernels for each pass here, one set for all
    # passes, the likelier reading of the paper, with `layers="shared"`.
    "tisa": _of_offset(scoring.TISA),
    "alibi": _of_offset(scoring.ALiBi, layers="shared"),
    # One function for all layers, as in the authors' code.
    "kerple-log": _of_offset(scoring.KerpleLog, layers="shared"),
    "kerple-power": _of_offset(scoring.KerplePower, layers="shared"),
    "tisa-v2": _of_offset(scoring.TISAv2),
    "near-far": _of_offset(scoring.NearFar),
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
    known = method.known(cls)
    unknown = sorted(set(config.options) - known)
    if unknown:
        raise ValueError(
            f"options of position {name!r} must be among {', '.join(sorted(known)) or 'none'}, "
            f"got {', '.join(unknown)}"
        )
    built: Position = cls(config, **method.options, **{**method.defaults, **config.options})
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
