"""What a trained language model can do, asked in the job that trains it: models are not kept.

asked.py       what is asked of every model of a grid
blimp.py       pairs of sentences in, how often the acceptable one is the likelier out
copying.py     a passage that comes again: what the model itself recalls
evaluating.py  a trained model in, everything that was asked of it out
rates.py       records of a grid in, each method's loss against the learning rate out
report.py      those curves, and what the models answered, as tables
drawing.py     the same as a figure

docs/pretraining.md tells how it is used.
"""
