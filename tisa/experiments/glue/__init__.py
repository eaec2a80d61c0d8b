"""The paper's Table 3: GLUE with and without TISA.

tasks.py      the eight tasks: files, columns, labels, metrics, recipes
reading.py    a task's rows, from official TSV files or the hub
metrics.py    what GLUE counts
batches.py    batches of similar length
cell.py       one cell of the table, and the grid of them
record.py     what a finished run leaves behind
training.py   one cell in, its record out
"""
