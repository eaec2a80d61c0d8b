"""A scoring function in place of its scores: it is asked for what this call needs.

That is any module or function that is called as `tisa.ScoringFunction` is, with the numbers of
queries and keys and, where a call has one, `query_start`. Where it has a method `band`, and leaving
offsets out saves work, that is asked too.
"""

from collections.abc import Callable

import torch

from tisa.offsets import span
from tisa.ops.call import autocast_enabled
from tisa.ops.validation import is_int, refuse
from tisa.scoring.layers import OURS, bands_of, scores_of
from tisa.shapes import Float, Int, Int32, Tensor

Scoring = Callable[..., Tensor]

# So few keys are one or two blocks of the GPU kernels: there is nothing for a band to leave out.
FEW_KEYS = 256


def asked(
    scoring: Scoring,
    query: Tensor,
    key: Tensor,
    *,
    packed: bool,
    max_seqlen: int | None,
    query_start: int | Int[Tensor, ""] | None,
    band: object,
    on_gpu: bool,
    ask: Callable[..., tuple[Tensor, Tensor | None] | None] | None = None,
) -> tuple[Float[Tensor, "heads span"] | None, Int32[Tensor, "heads 2"] | None]:
    """Return the scores and the band of a call; nothing for a call that validation will refuse."""
    if band is not None:
        refuse(
            "band", "None beside a scoring function, which is asked for its own",
            type(band).__name__,
            "leave it out, or pass the vector: scoring(queries, keys)",
        )  # fmt: skip
    if not all(isinstance(x, Tensor) and x.ndim == (3 if packed else 4) for x in (query, key)):
        return None, None
    if query_start is not None and not (is_int(query_start) or isinstance(query_start, Tensor)):
        return None, None
    queries, keys = query.shape[-2], key.shape[-2]
    if packed:
        if not is_int(max_seqlen) or max_seqlen is None or max_seqlen < 0:
            return None, None
        queries = keys = max_seqlen
    dtype = query.dtype
    if dtype != torch.float64 and autocast_enabled(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
    banded = on_gpu and worth_a_band(dtype, keys)
    known, scores = None, None
    if ask is not None and type(scoring) in OURS:
        known = ask(scoring, queries, keys, query_start, dtype if banded else None)
    if known is not None:
        scores = known[0]
    elif on_gpu and type(scoring) in OURS:
        (scores,) = scores_of([scoring], queries, keys, query_start=query_start)
    else:
        told = {} if query_start is None else {"query_start": query_start}
        scores = scoring(queries, keys, **told)
    expected = (query.shape[1], span(queries, keys))
    if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        refuse(
            "offset_scores",
            f"a function that returns (heads, queries + keys − 1) = {expected} scores for "
            f"{queries} queries and {keys} keys",
            f"{got} from {type(scoring).__name__}",
            "build it with the query's number of heads",
        )
    if known is not None:
        return known
    return scores, bands_of([scoring], dtype)[0] if banded else None


def worth_a_band(dtype: torch.dtype, keys: int) -> bool:
    """Return whether the GPU kernels save work by leaving out what lies outside of a band."""
    # A compiled program is for any length.
    return dtype != torch.float64 and (torch.compiler.is_compiling() or keys > FEW_KEYS)
