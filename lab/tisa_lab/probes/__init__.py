"""Tasks without a corpus that only positions solve, at the training length and past it.

tasks.py   five tasks: inputs and answers of any length
race.py    a small encoder for each method and task, trained and asked
report.py  the answers as tables, a figure and files

docs/pretraining.md tells how it is used.
"""
