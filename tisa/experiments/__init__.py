"""Configs in, records out: what the paper claims and what is measured.

  record.py   what every record says about where it was made

`criteria/` is Table 1, measured; `glue/` is Table 3; `pretrain/` trains language models,
`extrapolation/` reads past their training length, `probes/` needs no corpus.
"""
