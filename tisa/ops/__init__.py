"""One attention operator for scores of offsets, with interchangeable backends.

Backends are tested against the reference. Every line imports only from lines above it:

    call.py        the validated call that every backend is given, and what goes on around it
    dropout.py     which weights are dropped: a pure function of seed and place
    schema.py      an operator of PyTorch whose inputs are a NamedTuple
    validation.py  arguments in, a call or an error out
    always.py      keys that a window does not hide, joined to what it shows
    scored.py      a scoring function in place of its scores
    repeats.py     a call that was made before is not looked at again
    reference.py   the specification
    blocks.py      equally long sequences, some queries at a time
    chunked.py     those blocks as an operator: any device, never an n × n tensor
    sdpa.py        PyTorch's attention with a dense bias
    flex.py        FlexAttention, compiled
    triton/        the fused kernels; docs/attention.md derives them
    api.py         validate, choose, call
    ring.py        a sequence spread over several processes
"""

from tisa.ops.api import attention

__all__ = ["attention"]
