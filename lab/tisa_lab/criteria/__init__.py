"""The paper's Table 1, measured: six criteria, an operational definition and a number for each.

  settings.py       the thresholds and sizes, fixed before the first full run
  paper.py          Table 1 as it was printed
  measurement.py    a number, its mark under a threshold, and what was seen
  draws.py          layers and models with random parameters
  witnesses.py      parameters that put attention far away, method by method
  inductive.py      handles dependencies of any length: a witness or a refutation
  data_driven.py    some positional parameter receives a gradient
  efficient.py      positional parameters at BERT-base size
  invariant.py      the same tokens elsewhere get the same logits and outputs
  parallel.py       how the critical path grows with the length
  interpretable.py  how much of the positional logits a function of the offset explains
  table.py          all of it for all methods: a record
  sensitivity.py    how the marks depend on the thresholds
  report.py         the record as Markdown, as a page, and as files
  figure.py         the record as a figure
  page.html         the page's sentences
  marks.html        the table of marks, for this page and the demo's

docs/methods.md explains the definitions and every disagreement.
"""
