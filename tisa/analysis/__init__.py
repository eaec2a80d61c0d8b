"""Seeing position in pretrained models: the paper's analysis, arrays in, arrays out.

    found = tisa.analysis.analyze("path/to/model")
    found.invariance["table"].r2, tisa.analysis.numbers_of(found)

Weights are read, no forward pass is run unless a text is given. docs/analysis.md has the
definitions. From bottom to top:

    decoders.py     whose attention is causal
    tensors.py      a model's tensors by name, none missing, all of one model
    families.py     where each family keeps its positions, and how its heads read them
    curves.py       curves that a model holds as such: T5 tables, TISA's kernels
    toeplitz.py     the Toeplitz fit and its R²
    resampling.py   what chance alone gives: nulls and bootstrap intervals
    grid.py         the same in two dimensions
    reading.py      what the layers read of a position; how much words and positions carry
    heads.py        F̂_P of single heads, and which heads care
    spectrum.py     principal components, and whether they turn
    kernels.py      how many kernels a curve needs
    text.py         logits by offset on a text
    whole.py        all of it for one model
    numbers.py      all of it as plain data
    colours.py      colours of figures and page, told apart by colour-blind readers
    correlation.py  Pearson's correlation with its interval
    scores.py       a column of scores that the user supplies
    plots/          the paper's figures: arrays in, Figure out
    figures.py      which figures a report has
    page/           one self-contained HTML page
    report.py       folder with page, figures and numbers, whole or not at all
"""

from tisa.analysis.numbers import numbers_of
from tisa.analysis.whole import Analysis, analyze

__all__ = ["Analysis", "analyze", "numbers_of"]
