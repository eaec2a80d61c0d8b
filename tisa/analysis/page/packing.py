"""Arrays as text: what of an analysis the page holds, small enough to send by mail.

Numbers are kept as 16-bit integers with a scale for each row. A head's F̂_P = R A Bᵀ Rᵀ is kept as
Z M Zᵀ: Z = U of the read table's singular vectors, M = S Vᵀ A Bᵀ V S, cut to the strongest `rank`
dimensions, which is chosen so that all heads of all layers take about a megabyte.
"""

import base64
from typing import Any

import torch

from tisa.analysis.colours import DIVERGING_DARK, SEQUENTIAL, diverging_map, lookup_table
from tisa.analysis.spectrum import components
from tisa.analysis.whole import NEAR, Analysis
from tisa.shapes import Float, Tensor

BUDGET = 1_200_000
REACH = 512
LARGEST_TABLE = 1024


def colours() -> dict[str, str]:
    """Return the page's colour maps."""
    return {
        "sequential": _text(lookup_table(SEQUENTIAL)),
        "diverging": _text(lookup_table(diverging_map())),
        "diverging_dark": _text(lookup_table(diverging_map(DIVERGING_DARK))),
    }


def pack(values: Float[Tensor, "rows columns"]) -> dict[str, Any]:
    """Return the array as text: integers of 16 bits, and one scale for each row."""
    values = values.detach().to(torch.float32).nan_to_num(0.0).contiguous()
    scale = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 32767
    whole = (values / scale).round().to(torch.int16)
    return {
        "rows": values.shape[0],
        "columns": values.shape[1],
        "scale": _text(scale.numpy().tobytes()),
        "data": _text(whole.numpy().tobytes()),
    }


def packed_model(found: Analysis, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs of one model, `numbers` among it as they are."""
    plain = {name: part for name, part in numbers.items() if name not in _HEAVY}
    if "curves" in numbers:
        plain["curves"] = [{"name": c["name"], "r2": c["r2"]} for c in numbers["curves"]]
    packed: dict[str, Any] = {"numbers": plain, "sources": []}
    if found.model is not None:
        packed |= _table(found)
        packed["sources"] += _weights(found, numbers)
    if found.curves:
        parts = [
            _part(c.curve.label, c.curve.offsets, c.curve.scores)
            | {"near": fits | {"reach": int(c.curve.offsets.abs().max())}}
            for c, fits in zip(found.curves, numbers["curves"], strict=True)
        ]
        note = "the scores that the model itself holds and adds to its logits"
        heads = max(c.curve.scores.shape[0] for c in found.curves)
        packed["sources"].append(_source("learned", "learned scores", note, heads, parts))
    if found.text is not None:
        text = found.text
        parts = [_part(f"layer {i + 1}", text.offsets, one) for i, one in enumerate(text.logits)]
        note = f"mean logit above its row's mean, over {text.tokens} tokens of text"
        heads = text.logits.shape[1]
        packed["sources"].append(_source("text", "on the text given", note, heads, parts))
    return packed


def _part(label: str, offsets: Tensor, curves: Tensor) -> dict[str, Any]:
    return {"label": label, "first": int(offsets[0]), "curves": pack(curves)}


def _source(key: str, label: str, note: str, heads: int, layers: list[Any]) -> dict[str, Any]:
    return {"key": key, "label": label, "note": note, "heads": heads, "layers": layers}


_HEAVY = ("kernels", "kernels_near", "text", "curves")


def _table(found: Analysis) -> dict[str, Any]:
    assert found.model is not None
    assert found.spectrum is not None
    table = found.model.positions
    if table.shape[0] > LARGEST_TABLE:
        table = _basis(table, 64)[0]
    return {"table": pack(table), "components": pack(found.spectrum.trajectories)}


def _weights(found: Analysis, numbers: dict[str, Any]) -> list[dict[str, Any]]:
    model, reading, raw = found.model, found.reading, found.raw_heads
    assert model is not None
    assert reading is not None
    assert raw is not None
    layers, heads = model.query.shape[:2]
    rank = int((BUDGET / (2 * layers * heads)) ** 0.5)
    sources = []
    for key, label, table, query, by_layer in (
        ("read", "weights, as the model reads", reading.table, model.query, found.heads),
        ("raw", "weights, raw product", model.positions, model.raw_query[None], (raw,)),
    ):
        other = model.key if key == "read" else model.raw_key[None]
        z, right = _basis(table, min(rank, 128))
        scaled = z.norm(dim=0)
        parts = []
        for layer, part in enumerate(by_layer):
            fits = {}
            here = table.shape[0] - 1  # offset 0
            if key == "read":
                fits["near"] = numbers["kernels_near"][layer] | {"reach": min(NEAR, here)}
                if layer == 0:
                    fits["whole"] = numbers["kernels"] | {"reach": here}
            reach = min(REACH, here)
            last = 0 if model.causal else reach
            curves = part.curves[:, here - reach : here + last + 1]
            maps = _maps(right, scaled, query[layer], other[layer])
            parts.append(
                _part(f"layer {layer + 1}", torch.tensor([-reach]), curves)
                | {"maps": pack(maps), **fits}
            )
        sources.append(_source(key, label, "", heads, parts) | {"basis": pack(z / scaled)})
    return sources


def _basis(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return Z (positions, rank) and V (width, rank) with table ≈ Z Vᵀ."""
    values, right = components(table)
    # One of a table of zeros, too.
    kept = max(1, int((values[:rank] > 1e-6 * values[0]).sum()))
    right = right[:, :kept].float()
    return table @ right, right


def _maps(back: Tensor, scaled: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return M of every head, one row each."""
    scale = query.shape[-1] ** -0.5
    a = scaled[:, None] * (back.T @ query)
    b = scaled[:, None] * (back.T @ key)
    return (a @ b.mT * scale).reshape(query.shape[0], -1)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
