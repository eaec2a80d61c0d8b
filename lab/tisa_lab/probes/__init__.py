"""Tasks without a corpus that only positions solve, at the training length and past it.

tasks.py   five tasks: inputs and answers of any length
training.py  a small model trained, and asked at longer inputs
race.py    a small encoder for each method and task, trained and asked
recall.py  a small decoder for each method, asked for values from ever farther away
jobs.py    the models of both as jobs of a sweep
report.py  the answers as tables, a figure and files

docs/pretraining.md tells how it is used.
"""
