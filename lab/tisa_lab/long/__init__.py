"""Finding things in long texts: a converted encoder beside what one would do without converting it.

settings.py   what is asked, and its sizes
texts.py      documents as sentences of tokens; which articles, which noise
tasks.py      passkey, needle, article: documents of one length, queries, which belongs to which
places.py     the original's position table at more places: interpolated, grouped, repeated
encoders.py   tokens in, vectors out: one pass or pieces, one vector or several
readings.py   every way to read a document, by name
pairs.py      two ways on the same queries: difference, interval, sign test
jobs.py       a model, a way and a length: a job, whose ranks are kept query by query
measuring.py  models in, record out
report.py     a record as tables, a figure and files

docs/long.md tells how it is used.
"""
