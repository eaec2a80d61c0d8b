"""Language models read past the length that they were trained at.

windows.py    documents cut into windows, and which tokens of a window count
readings.py   the same weights with other options of their method
measuring.py  trained models in, their loss by length and by position out
report.py     a record as tables, a figure and files; several records as one
page.py       a record as a page
page.html     its sentences

docs/pretraining.md tells how it is used.
"""
