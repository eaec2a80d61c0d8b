"""Pretraining with any position method, masked or causal, on one process or many.

config.py       everything that a run's result depends on; how it is carried out
text.py         documents of a corpus (text files, Parquet, the hub), and what cuts them into tokens
corpus.py       documents as tokens, streamed or prepared; a corpus from what a user names
batches.py      what a model is given in a step: rows, masks, packing, made ready ahead
asking.py       what a trained model may be asked before its run ends
model.py        a language model with its loss; processes; what fits and what it will cost; what the
                model knows about position
checkpoints.py  a run's folder: which run it is, checkpoints, the model and the record
training.py     one run from top to bottom
report.py       records in, tables and figures out
grid.py         methods × rates × seeds, several runs at a time

docs/pretraining.md tells how it is used.
"""
