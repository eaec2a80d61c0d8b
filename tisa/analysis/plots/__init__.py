"""The paper's figures for any model: arrays in, matplotlib `Figure` out.

Nothing here knows of models or files; `figures` decides which figures a report has. Maps of P are
drawn in viridis (Figs 1, 4, 5), positional attention of heads in a second scheme (Fig 8).

    style.py   what all figures share
    maps.py    the table itself, P, its Toeplitz fit, all heads on one page
    lines.py   R² beside chance, scatter, curves and kernels, spectrum
"""

from tisa.packages import needed

# Before the files here, which import it.
needed("matplotlib", "figures", "tisa[analysis]")

from tisa.analysis.plots.lines import (  # noqa: E402
    kernel_curves,
    kernel_errors,
    learned_curves,
    logit_terms,
    offset_rows,
    score_scatter,
    spectrum,
    toeplitz_bars,
)  # fmt: skip
from tisa.analysis.plots.maps import (  # noqa: E402
    embedding_table,
    gram_map,
    gram_maps,
    grid_steps,
    head_maps,
    layers_by_offset,
    toeplitz_parts,
)  # fmt: skip

__all__ = [
    "embedding_table", "gram_map", "gram_maps", "grid_steps", "head_maps", "kernel_curves",
    "kernel_errors", "layers_by_offset", "learned_curves", "logit_terms", "offset_rows",
    "score_scatter", "spectrum", "toeplitz_bars", "toeplitz_parts",
]  # fmt: skip
