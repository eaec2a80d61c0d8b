"""One attention operator for scores of offsets, with interchangeable backends.

`api` validates and chooses; `reference` is the specification; `chunked`, `sdpa`, `flex` and
`triton` are tested against it. `call` is what a backend is given, `dropout` which weights are
dropped, `repeats` what is not looked at twice. `ring` spreads a sequence over several processes.
"""

from tisa.attention.api import attention

__all__ = ["attention"]
