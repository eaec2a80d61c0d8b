"""The paper's Table 3: GLUE with and without TISA. One cell is followed from top to bottom:

cell.py      the rows of the table, one cell, the grid of them, the record of a finished one
tasks.py     the eight tasks: recipes, a task's rows from official files or the hub, metrics
batches.py   tokenized rows and which of them make a batch, padded or packed
starts.py    what a cell starts from; fitted kernels are made once for all seeds and kept
training.py  one cell in, its record out
stack.py     many models of one architecture as one batched model
stacked.py   many cells in, their records out: trained side by side
table3.py    a grid in, every cell's record in a folder: the plan, the place, the sweep
numbers.py   records in, the numbers of Table 3 out
report.py    those numbers as Markdown, LaTeX, CSV, a figure

docs/glue.md tells how it is used.
"""

# Says which extra to install where transformers is not there.
import tisa.hf  # noqa: F401
