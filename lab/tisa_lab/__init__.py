"""The laboratory: configs in, records out. What the paper claims, and what is measured.

  record.py     what every record says about where it was made
  view.py       how far a run or a sweep is, as one sees it
  tables.py     rows of texts as Markdown, LaTeX, CSV
  executors.py  where jobs are done: here, in a pool of processes, on Ray
  sweep.py      jobs in, every job's record in a folder, whatever is killed

`criteria/` is Table 1, measured; `glue/` is Table 3; `pretrain/` trains language models,
`extrapolation/` reads past their training length, `evaluation/` asks what they can do, `long/`
reads long texts with converted encoders, `probes/` needs no corpus; `demo/` tells the whole story
about one model; `cli/` is the command `tisa-lab`.
"""

__version__ = "0.1.0"
