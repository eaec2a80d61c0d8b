"""One page about a conversion: before and after, and every head's curve."""

from html import escape
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tisa.hf.folder import Done
from tisa.scoring import TISA

REACH = 32
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
table { border-collapse: collapse; } th, td { padding: .25rem .75rem; text-align: right;
  border-bottom: 1px solid #bbb; } th:first-child, td:first-child { text-align: left; }
.heads { display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: .75rem; }
figure { margin: 0; } figcaption { font-size: .75rem; }
svg { width: 100%; height: auto; } path { fill: none; stroke: #0063a6; stroke-width: 1.5; }
line { stroke: #999; stroke-width: .5; }
@media (prefers-color-scheme: dark) { body { color: #eee; background: #181818; }
  path { stroke: #6cb8ff; } }
"""


def write_report(done: Done, path: str | Path) -> Path:
    """Write the page, which needs nothing beside it."""
    path = Path(path)
    path.write_text(page(done), encoding="utf-8")
    return path


def page(done: Done) -> str:
    """Return the page as HTML."""
    tisa = done.converted.config.tisa
    name = escape(Path(str(done.original.config.name_or_path or "model")).name)
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{done.before[key]:.4f}</td>"
        f"<td>{done.after[key]:.4f}</td></tr>"
        for key in done.before
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} converted</title><style>{STYLE}</style></head><body>
<h1>{name}, converted</h1>
<p>Positions: {tisa["positions"]}. Start: {tisa["start"]}. {tisa["num_kernels"]} kernels per head.
Replaced: {tisa["replaced_parameters"]:,} position parameters, by {_count(done.converted):,}.</p>
<table><thead><tr><th>measured on held-out text</th><th>before</th><th>after</th></tr></thead>
<tbody>{rows}</tbody></table>
<h2>Every head's curve</h2>
<p>f(k) for offsets k = key − query from −{REACH} to {REACH}; the level far away is 0, the broken
lines are k = 0 and f = 0. Numbers: smallest and largest score.</p>
{"".join(_layer(i, curves) for i, curves in enumerate(curves_of(done.converted)))}
</body></html>
"""


def curves_of(model: PreTrainedModel, reach: int = REACH) -> list[torch.Tensor]:
    """Return f(k) for |k| ≤ reach of every scoring function, each (heads, 2·reach + 1)."""
    offsets = torch.arange(-reach, reach + 1, device=model.device)
    scorings = [m for m in model.modules() if isinstance(m, TISA)]
    return [scoring.scores(offsets).detach().cpu() for scoring in scorings]


def _layer(number: int, curves: torch.Tensor) -> str:
    drawn = "".join(_head(number, head, curve) for head, curve in enumerate(curves))
    return f"<h3>Layer {number + 1}</h3><div class='heads'>{drawn}</div>"


def _head(layer: int, head: int, curve: torch.Tensor) -> str:
    low, high = min(0.0, float(curve.min())), max(0.0, float(curve.max()))
    height = max(high - low, 1e-3)
    across = 120 / (len(curve) - 1)
    points = [(i * across, 58 - 56 * (float(v) - low) / height) for i, v in enumerate(curve)]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    zero = 58 - 56 * (0 - low) / height
    at = int(curve.abs().argmax()) - (len(curve) - 1) // 2
    caption = f"head {head + 1}: {curve.min():.2f} … {curve.max():.2f}, largest at {at:+d}"
    return (
        f"<figure><svg viewBox='0 0 120 60' role='img' aria-label='layer {layer + 1}, {caption}'>"
        f"<line x1='0' x2='120' y1='{zero:.1f}' y2='{zero:.1f}' stroke-dasharray='2'/>"
        f"<line x1='60' x2='60' y1='0' y2='60' stroke-dasharray='2'/><path d='{path}'/></svg>"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _count(model: PreTrainedModel) -> int:
    return sum(
        p.numel()
        for n, p in model.named_parameters()
        if "offset_scores" in n or n.endswith(".fold")
    )
