"""Pretraining with any position method, masked or causal, on one process or many.

reading.py      documents of a corpus: text files, Parquet, the hub
tokenizers.py   text in, numbers out
corpus.py       documents as tokens, some at a time, streamed or prepared
keyed.py        random numbers that depend on their key alone
rows.py         documents cut into rows of equal length
batches.py      what a model is given in a step
loading.py      steps made ready ahead
config.py       everything that a run's result depends on
model.py        a language model with its loss, parameters in groups
launching.py    where a run takes place: settings, accelerate
throughput.py   work of a step, share of the device's arithmetic
observing.py    what a model in training knows about position
evaluation.py   the loss on held-out documents
checkpoints.py  there whole or not at all
outcome.py      the model and the record that are left
loop.py         forward, backward, update
session.py      a run while it lasts
training.py     one run, its record out
summary.py      records in, the numbers of tables out
figures.py      records in, figures out
opening.py      a corpus from what a user names
plan.py         what a run will cost
live.py         a run as one sees it

docs/pretraining.md tells how it is used.
"""
