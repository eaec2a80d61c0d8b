"""One page about a conversion: before and after, and every head's curve. Its text: report.html."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tisa import store
from tisa.hf.core import OwnScores
from tisa.hf.folder import Done
from tisa.pages import page as made_page
from tisa.pages.kit import minus, signed
from tisa.parameters import is_score

REACH = 32


def write_report(done: Done, path: str | Path) -> Path:
    """Write the page, which needs nothing beside it."""
    path = Path(path)
    store.write_text(path, page(done))
    return path


def page(done: Done) -> str:
    """Return the page as HTML."""
    heads = [
        head_of(layer + 1, number + 1, curve)
        for layer, curves in enumerate(curves_of(done.converted))
        for number, curve in enumerate(curves)
    ]
    widest = max(range(len(heads)), key=lambda i: heads[i]["spread"], default=0)
    return made_page(
        "tisa.hf/report.html",
        data={"curves": {"reach": REACH, "heads": heads, "first": widest}},
        name=Path(str(done.original.config.name_or_path or "model")).name,
        tisa=done.converted.config.tisa,
        count=_count(done.converted),
        before=done.before,
        after=done.after,
        verdict=done.verdict.told() if done.after else [],
    )


def curves_of(model: PreTrainedModel, reach: int = REACH) -> list[torch.Tensor]:
    """Return f(k) for |k| ≤ reach of every scoring function, each (heads, 2·reach + 1)."""
    offsets = torch.arange(-reach, reach + 1, device=model.device)
    owners = (m for m in model.modules() if isinstance(m, OwnScores))
    scorings: list[Any] = [scoring for owner in owners for scoring in owner.offset_scores]
    return [scoring.scores(offsets).detach().cpu() for scoring in scorings]


def peak_of(curve: torch.Tensor) -> int | None:
    """Return the offset of the largest score; None where more than one offset has it."""
    largest = (curve == curve.max()).nonzero()
    return int(largest[0]) - len(curve) // 2 if len(largest) == 1 else None


def head_of(layer: int, head: int, curve: torch.Tensor) -> dict[str, Any]:
    """Return a head's curve, where it is largest, and what is said of it."""
    low, high, peak = float(curve.min()), float(curve.max()), peak_of(curve)
    at = (
        "largest at several offsets"
        if peak is None
        else f"largest positive score at {signed(peak)}"
    )
    at = at if high > 0 else "no positive score"
    return {
        "layer": layer,
        "head": head,
        "peak": peak,
        "spread": round(high - low, 3),
        "values": [round(value, 3) for value in curve.tolist()],
        "told": minus(f"{low:z.2f} … {high:z.2f}, {at}"),
    }


def _count(model: PreTrainedModel) -> int:
    return sum(p.numel() for n, p in model.named_parameters() if is_score(n))
