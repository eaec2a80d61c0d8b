"""Language models read past the length that they were trained at.

windows.py    documents cut into windows, and which tokens of a window count
measuring.py  a trained model in, its loss by length and by position out
tables.py     those numbers as Markdown
figure.py     those numbers as a figure
report.py     all of it as files; several records as one

docs/pretraining.md tells how it is used.
"""
