"""The operator: validate, choose a backend, call it."""

from importlib.util import find_spec
from types import ModuleType

import torch

from tisa.offsets import Window
from tisa.ops import chunked, reference, repeats, sdpa
from tisa.ops.call import Call, exporting, without_autocast
from tisa.ops.scored import Scoring, asked
from tisa.ops.validation import checked_call
from tisa.shapes import Bool, Float, Int, Int32, Tensor

BACKENDS = ("reference", "chunked", "sdpa", "flex", "triton")
GPUS = ("cuda", "xpu")
# Asked once, here: a compiled graph cannot ask.
HAS_TRITON = find_spec("triton") is not None
HALF = (torch.float16, torch.bfloat16)


def attention(
    query: Float[Tensor, "*batch_heads queries dim"],
    key: Float[Tensor, "*batch_key_heads keys dim"],
    value: Float[Tensor, "*batch_key_heads keys value_dim"],
    offset_scores: Float[Tensor, "heads span"] | Scoring | None = None,
    *,
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    key_scores: Float[Tensor, "*batch_heads keys"]
    | Float[Tensor, "*batch_heads queries"]
    | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Int32[Tensor, " ends"] | None = None,
    max_seqlen: int | None = None,
    query_start: int | Int[Tensor, ""] | None = None,
    window: int | Window | None = None,
    always: Int[Tensor, "sequences places"] | None = None,
    band: Int32[Tensor, "heads 2"] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(q·kᵀ·scale + f(key − query) + c(key) + mask) · v, in the query's dtype.

    The layout is that of PyTorch's scaled_dot_product_attention, (batch, heads, length, dim).
    A query that may look at no key gets zeros. Keys and values must be finite also where nobody may
    look, as everywhere in PyTorch (0 · NaN is NaN): fill a static cache with zeros.

    Args:
        query: the queries.
        key: the keys, as many heads as the queries or, with `enable_gqa`, a divisor of them.
        value: the values, as long as the keys.
        offset_scores: a scoring function (or any module or function that is called as one is),
            asked here for the scores and the band of this call. Or the scores themselves, float32,
            one per head and offset in the order of `tisa.offsets`: what it returns for these
            lengths (and this `query_start`). Finite, or −inf for an offset that nobody may look at.
            None: no positions.
        attn_mask: boolean (True: may be seen) or floating point (added to the logits),
            broadcastable to (batch, heads, queries, keys). False, −inf and the lowest number
            of the mask's dtype (`torch.finfo(dtype).min`, which model libraries write for "hidden")
            hide a key; a query whose keys all have the same other number sees them all alike.
        key_scores: a score for each key, float32, added to every logit of that key: (batch, heads,
            keys) with the query's heads, or (total, heads) packed. −inf for a key that nobody may
            look at. The gates of the Forgetting Transformer are one: the negative cumulative sums
            of their logarithms, as a query's own sum cancels in the softmax.
        dropout_p: share of the attention weights that is dropped; pass 0 in evaluation.
        is_causal: hide keys after the query; with fewer queries than keys the last query sees all
            (bottom-right), as with a cache.
        scale: factor on q·kᵀ, by default 1/√dim.
        enable_gqa: allow fewer key heads than query heads.
        cu_seqlens: a packed batch: query, key and value are (total, heads, dim), sequence s being
            the tokens from cu_seqlens[s] to cu_seqlens[s + 1]; scores span 2·max_seqlen − 1.
        max_seqlen: length of the longest packed sequence.
        query_start: position of the first query where the first key has position 0; an int, or a
            tensor for a static cache. By default the last query stands beside the last key. Where
            you pass scores, give it to the scoring function too.
        window: how far a query sees, to both sides or as (left, right); None is without limit.
        always: places of keys that the window does not hide, (batch, places) or, packed, for each
            sequence its own, counted from its first key; −1 is none. A causal or other mask hides
            them as ever. Not a learned logit, which attention sinks are elsewhere.
        band: (heads, 2) offsets from `scoring.band(query.dtype)`; outside, a score is that of the
            band's edge, which also receives what comes back to it. "triton" skips work there. A
            scoring function in place of scores has its own.
        return_lse: return also the log-sum-exp of the logits, (batch, heads, queries), −inf for a
            query that sees nothing.
        backend: "reference", "chunked", "sdpa", "flex" or "triton", which does the call or raises;
            "auto" takes "sdpa" without scores and with them "triton" on a GPU, mostly "chunked"
            elsewhere (the rule: `from tisa.ops.api import choose_backend`).
    """
    told = signature = None
    if callable(offset_scores) and not isinstance(offset_scores, Tensor):
        offset_scores, band = asked(
            offset_scores, query, key, packed=cu_seqlens is not None, max_seqlen=max_seqlen,
            query_start=query_start, band=band,
            on_gpu=backend == "triton" or (backend == "auto" and _on_gpu(query)),
            ask=None if not _in_cpp() else _backend("triton").ask,
        )  # fmt: skip
    # Nothing else has a `repeat`; on a CPU that would be lost time, unless Triton is interpreted.
    repeatable = cu_seqlens is None and key_scores is None and always is None
    if repeatable and (backend == "triton" or (backend == "auto" and _on_gpu(query))):
        told = (
            query, key, value, offset_scores, band, attn_mask,
            dropout_p, is_causal, scale, enable_gqa, max_seqlen, query_start, window, return_lse,
            backend,
        )  # fmt: skip
        found = repeats.native.attend(*told) if _in_cpp() else None
        if found is not None:
            return found
        signature = repeats.signature(*told)
        again = repeats.find(signature)
        if again is not None:
            return again(query, key, value, offset_scores, band, attn_mask)
    call = checked_call(
        query,
        key,
        value,
        offset_scores,
        attn_mask=attn_mask,
        key_scores=key_scores,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        query_start=query_start,
        window=window,
        always=always,
        band=band,
        return_lse=return_lse,
    )
    name = choose_backend(call) if backend == "auto" else backend
    chosen = _backend(name)
    reason = chosen.refuses(call)
    if reason is not None:
        raise ValueError(
            f'tisa.attention: backend "{name}" cannot do this call: {reason}; '
            'take backend="auto" or another by name'
        )
    if call.empty:
        # Zeros, whoever is asked; not every backend says them, and some allocate n² to do so.
        chosen = chunked if chunked.refuses(call) is None else reference
    with without_autocast(call.query.device):
        output, lse = chosen.attend(call)
    if told is not None and name == "triton" and call.query is query and not call.empty:
        if signature is not None:
            repeats.keep(signature, lambda: chosen.repeat(call))
        if _in_cpp():
            chosen.record(call, told)
    return (output, lse) if return_lse else output


def choose_backend(call: Call) -> str:
    """Return the backend that "auto" takes: the first preferred one that does not refuse.

    0. In a graph that is being exported "sdpa", else "reference": PyTorch's operators only.
    1. "sdpa" where it needs no dense bias (it is flash attention then).
    2. "triton" on a GPU.
    3. "sdpa" for float32 on an accelerator, while the dense bias has at most 2²⁸ elements (1 GiB).
    4. "chunked" otherwise: on the CPU, which it is faster on from n = 512; in half precision, where
       a dense bias would round the scores; and where n² memory begins to hurt.
    5. What these refuse (a log-sum-exp, torch.func): the next of "triton" (on a
       GPU), "chunked", "sdpa", "reference". "flex" is taken only by name: it compiles for a while
       on first use.

    benchmarks/results has the measurements behind 2 (in bfloat16), 3 and 4.
    """
    dense = call.biased or sdpa.is_dense(call)
    device = call.query.device.type
    dense_is_fine = (
        device != "cpu" and call.query.dtype not in HALF and sdpa.dense_elements(call) <= 2**28
    )
    fused = ("triton",) if device in GPUS and HAS_TRITON else ()
    if exporting():
        preferred = ("sdpa", "reference", "chunked")
    elif not dense:
        preferred = ("sdpa", *fused, "chunked", "reference")
    elif dense_is_fine:
        preferred = (*fused, "sdpa", "chunked", "reference")
    else:
        preferred = (*fused, "chunked", "sdpa", "reference")
    return next(name for name in preferred if _backend(name).refuses(call) is None)


def _in_cpp() -> bool:
    return not torch.compiler.is_compiling() and repeats.native is not None


def _on_gpu(query: object) -> bool:
    return isinstance(query, Tensor) and query.device.type in GPUS


def _backend(name: str) -> ModuleType:
    if name not in BACKENDS:
        raise ValueError(
            f'tisa.attention: backend must be "auto" or one of {", ".join(BACKENDS)}, '
            f'got {name!r}; "auto" takes the one that fits'
        )
    if name == "flex":
        # Here, because importing it takes as long as the rest of the package together.
        from tisa.ops import flex

        return flex
    if name == "triton":
        if not HAS_TRITON:
            raise ModuleNotFoundError(
                'tisa.attention: backend "triton" needs the package triton, which PyTorch brings '
                "along on Linux with a GPU; install it, or take another backend"
            )
        from tisa.ops import triton

        return triton
    return {"reference": reference, "chunked": chunked, "sdpa": sdpa}[name]
