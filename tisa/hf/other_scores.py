"""What a converted model's config says of its scores: kernels, or any other scoring function.

Kernels need nothing but the file `modeling_tisa.py` that lies beside the model. The formula of
another function does not travel: the model is loaded with the package tisa, and a class of
somebody's own must be there (`tisa.positions.recalled`).
"""

from inspect import signature
from typing import Any

from transformers import PreTrainedModel

from tisa.hf import families
from tisa.positions import Given, described, recalled, resolve
from tisa.scoring import TISA

# Kernels of a head unless one says otherwise.
KERNELS = 5


def described_scoring(
    scoring: Given, model: PreTrainedModel, num_kernels: int, init: str
) -> dict[str, Any]:
    """Return what the config says of the function, or refuse what it cannot be given."""
    chosen = resolve(scoring, what="scoring")
    cls, given = chosen.scoring, dict(chosen.options)
    if cls is None:
        raise ValueError(
            f"scoring must be a function of the offset (a tisa.ScoringFunction), got "
            f"{chosen.name!r}, which is another position method"
        )
    if cls is TISA:
        if set(given) - {"num_kernels"}:
            raise ValueError(
                "scoring: kernels have the option num_kernels, and `init` is an argument of its "
                f"own; got {', '.join(sorted(given))}"
            )
        return {"num_kernels": given.get("num_kernels", num_kernels)}
    taken = signature(cls).parameters
    if "num_kernels" in taken:
        given.setdefault("num_kernels", num_kernels)
    elif num_kernels != KERNELS:
        raise ValueError(
            f"num_kernels must be left out with scoring {chosen.name!r}, got {num_kernels}"
        )
    if init == "zero":
        if "init" not in taken:
            raise ValueError(
                f'init must be "fit" or "reference" with scoring {chosen.name!r}, which has no '
                'initial values without scores, got "zero"'
            )
        given.setdefault("init", "zero")
    if all(getattr(module, "is_causal", False) for module in families.attention_modules(model)):
        given = {**chosen.method.options["decoder"], **given}
    known = chosen.method.known(chosen.method.load())
    unknown = set(given) - (known or set(given)) - set(chosen.method.options["decoder"])
    if unknown or "layers" in given:
        raise ValueError(
            f"scoring: options of {chosen.name!r} must be among "
            f"{', '.join(sorted((known or set()) - {'layers'})) or 'none'}, got "
            f"{', '.join(sorted(unknown or {'layers'}))}"
        )
    told = {"name": chosen.name, "source": described(chosen), "options": given}
    return {"format": 2, "num_kernels": given.get("num_kernels", 0), "scoring": told}


def with_scoring(tisa: dict[str, Any], given: Given | None) -> None:
    """Refuse a config whose function is not at hand; let it be the class that is given."""
    told = tisa.get("scoring")
    if told is None:
        if given is not None and resolve(given, what="scoring").scoring is not TISA:
            raise ValueError(f"scoring must be None for a model of kernels, got {given!r}")
        return
    found = resolve(recalled(told["name"], told["source"], given, what="scoring"), what="scoring")
    if found.scoring is None:
        raise ValueError(f"scoring must be a tisa.ScoringFunction, got {found.name!r}")
    tisa["scoring"] = {**told, "name": found.name, "source": described(found)}
