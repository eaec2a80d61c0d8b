"""The paper's Table 3: GLUE with and without TISA.

tasks.py      the eight tasks: files, columns, labels, metrics, recipes
reading.py    a task's rows, from official TSV files or the hub
metrics.py    what GLUE counts
batches.py    batches of similar length
packing.py    batches without any padding
cell.py       one cell of the table, and the grid of them
starts.py     fitted kernels, made once for all seeds and kept
record.py     what a finished run leaves behind
trainer.py    Hugging Face's Trainer with our batches and groups
training.py   one cell in, its record out
rows.py       a task's rows on a device, and their order for many cells
stacked_modules.py  linear maps, norms, embeddings, attention of many models in one
stack.py      many models of one architecture as one batched model
side_by_side.py  many cells in, their records out: as one batched model
stacked.py    where many are run side by side, and which go together
plan.py       what a sweep will cost
live.py       a sweep as one sees it
summary.py    records in, the numbers of Table 3 out
tables.py     those numbers as Markdown, LaTeX, CSV
figure.py     those numbers as a figure

docs/glue.md tells how it is used.
"""

# Says which extra to install where transformers is not there.
import tisa.hf  # noqa: F401
