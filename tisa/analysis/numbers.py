"""An analysis as plain data: what `tisa analyze --json` prints and the page reads."""

import math
from typing import Any

from tisa.analysis.heads import SENSITIVE, Heads
from tisa.analysis.kernels import KernelFits
from tisa.analysis.reading import TERMS
from tisa.analysis.whole import Analysis, Invariance


def numbers_of(found: Analysis) -> dict[str, Any]:
    """Return every number of the analysis, rounded to six significant digits."""
    numbers: dict[str, Any] = {"name": found.name, "family": found.family}
    if found.model is not None:
        numbers |= _of_table(found)
    if found.curves:
        numbers["curves"] = [
            {
                "name": learned.curve.name,
                "label": learned.curve.label,
                "heads": learned.curve.scores.shape[0],
                "offsets": [int(learned.curve.offsets[0]), int(learned.curve.offsets[-1])],
            }
            | _of_fits(learned.fits)
            for learned in found.curves
        ]
    if found.text is not None:
        text = found.text
        numbers["text"] = {
            "tokens": text.tokens,
            "offsets": [int(text.offsets[0]), int(text.offsets[-1])],
            "logits": text.logits.tolist(),
            "weights": text.weights.tolist(),
        }
    return _rounded(numbers)


def _of_table(found: Analysis) -> dict[str, Any]:
    model, reading, spectrum = found.model, found.reading, found.spectrum
    assert model is not None
    assert reading is not None
    assert spectrum is not None
    assert found.raw_heads is not None
    assert found.fits is not None
    numbers: dict[str, Any] = {
        "positions": model.positions.shape[0],
        "width": model.positions.shape[1],
        "leading_rows": model.leading_rows,
        "special_first": model.special_first,
        "causal": model.causal,
        "layers": model.query.shape[0],
        "heads": model.query.shape[1],
        "toeplitz": {name: _of_invariance(part) for name, part in found.invariance.items()},
        "blocks": [
            {"start": start, "end": end} | _of_invariance(part) for start, end, part in found.blocks
        ],
        "input_shares": {
            "position": reading.share_position,
            "word": reading.share_word,
            "rest": reading.share_rest,
        },
        "pca": {
            "dimensions_90": spectrum.dimensions(0.9),
            "dimensions_99": spectrum.dimensions(0.99),
            "variance": spectrum.variance[:64].tolist(),
            "frequencies": spectrum.frequencies.tolist(),
            "purity": spectrum.purity.tolist(),
            "step_r2": spectrum.step_r2,
            "still_r2": spectrum.still_r2,
            "periods": [list(pair) for pair in spectrum.periods[:8]],
        },
        "sensitive_above": SENSITIVE,
        "first_layer_raw": _of_heads(found.raw_heads),
        "layers_as_read": [_of_heads(heads) for heads in found.heads],
        "kernels": _of_fits(found.fits),
        "kernels_near": [_of_fits(fits) for fits in found.near_fits],
    }
    if found.grid is not None:
        assert model.grid is not None
        _, r2, off, null, null_off = found.grid
        rows, columns = model.grid
        numbers["grid"] = dict(rows=rows, columns=columns, r2=r2, off_diagonal=off, null=null,
                               off_diagonal_null=null_off)  # fmt: skip
    if found.terms is not None:
        shares = found.terms / found.terms.sum(1, keepdim=True)
        numbers["logit_terms"] = {
            "names": list(TERMS),
            "deviation": found.terms.sum(1).sqrt().tolist(),
            "shares": shares.tolist(),
        }
    return numbers


def _of_invariance(part: Invariance) -> dict[str, Any]:
    null = part.null
    return {
        "r2": part.r2,
        "interval": list(part.interval),
        "null": null.whole,
        "null_deviation": null.whole_deviation,
        "off_diagonal": part.off_diagonal,
        "off_diagonal_interval": list(part.off_diagonal_interval),
        "off_diagonal_null": null.off_diagonal,
        "off_diagonal_null_deviation": null.off_diagonal_deviation,
    }


def _of_heads(heads: Heads) -> dict[str, Any]:
    names = ("r2", "off_diagonal", "null", "strength")
    return {name: getattr(heads, name).tolist() for name in names} | {"sensitive": heads.sensitive}


def _of_fits(fits: KernelFits) -> dict[str, Any]:
    """Return errors by S, and the kernels of every S, each (heads, S)."""
    errors = {"r2": fits.r2, "rms": fits.rms, "constant": fits.constants}
    return {name: values.tolist() for name, values in errors.items()} | {
        name: [getattr(kernels, name).tolist() for kernels in fits.kernels]
        for name in ("amplitude", "sharpness", "offset")
    }


def _rounded(value: Any) -> Any:
    """Return the data with six significant digits; NaN, which JSON does not know, as None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return value
