"""One validated call of the operator, what every backend is given; and what goes on around it.

Shapes are (batch, heads, length, dim), or (total, heads, dim) for a packed batch. What a position
method and the masks of distance (causal, window) say is gathered in one vector per head: an offset
that a query may not look at is an offset with the score −inf. Around a call: gradients that are
wanted, transforms that look into it, autocast.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tisa.offsets import (
    Window,
    hold_outside,
    offset_of,
    offset_range,
    recentred,
    span,
    to_matrix,
    visible,
)
from tisa.shapes import Bool, Float, Int, Int32, Tensor

PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


@dataclass(frozen=True)
class Call:
    """The arguments of `tisa.attention`, checked, with every default filled in."""

    query: Float[Tensor, "*batch_heads queries dim"]
    key: Float[Tensor, "*batch_key_heads keys dim"]
    value: Float[Tensor, "*batch_key_heads keys value_dim"]
    scores: Float[Tensor, "heads span"] | None
    band: Int32[Tensor, "heads 2"] | None
    # Four axes, each the full length or 1.
    attn_mask: Bool[Tensor, "b h q k"] | Float[Tensor, "b h q k"] | None
    key_scores: Float[Tensor, "batch heads keys"] | Float[Tensor, "total heads"] | None
    dropout_p: float
    is_causal: bool
    window: Window
    scale: float
    query_start: int | Int[Tensor, ""]
    cu_seqlens: Int32[Tensor, " ends"] | None
    max_seqlen: int
    return_lse: bool
    # For each sequence places of keys that the window does not hide; −1 is none.
    always: Int[Tensor, "sequences places"] | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences lie end to end, without a batch axis."""
        return self.cu_seqlens is not None

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of queries and keys that one score vector spans."""
        if self.packed:
            return self.max_seqlen, self.max_seqlen
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def heads(self) -> tuple[int, int]:
        """The number of query heads and of key heads."""
        return self.query.shape[1], self.key.shape[1]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        heads, key_heads = self.heads
        # Not `return heads != key_heads`: of symbolic sizes that would be no bool.
        return False if heads == key_heads else True  # noqa: SIM211

    @property
    def empty(self) -> bool:
        """Whether there is nothing to attend to or nobody who attends."""
        no_sequence = self.packed and self.max_seqlen == 0
        return self.query.numel() == 0 or self.key.numel() == 0 or no_sequence

    @property
    def biased(self) -> bool:
        """Whether anything but a causal mask is added to the logits."""
        windowed = self.window != (None, None)
        added = (self.scores, self.attn_mask, self.key_scores)
        return any(x is not None for x in added) or self.packed or windowed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which logits and their softmax are computed."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def reach(self) -> Window:
        """The lowest and highest visible offset as (left, right): −left ≤ offset ≤ right."""
        left, right = self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def offset_logits(self, *, windowed: bool = True) -> Float[Tensor, "heads_or_1 span"] | None:
        """Return what each offset adds to the logits; None when no offset adds anything.

        The scores, held constant outside the band, and −inf where a query may not look; with
        `windowed` off where it may not look for another reason than the window.
        """
        queries, keys = self.lengths
        offsets = offset_range(
            queries, keys, query_start=self.query_start, device=self.query.device
        )
        scores = self.scores
        if scores is not None:
            scores = scores.to(self.dtype)
            if self.band is not None:
                scores = hold_outside(scores, self.band, offsets)
        reach = self.reach if windowed else (None, 0 if self.is_causal else None)
        seen = visible(offsets, reach)
        if seen is None:
            return scores
        if scores is None:
            scores = torch.zeros(1, offsets.shape[0], dtype=self.dtype, device=offsets.device)
        return torch.where(seen, scores, -torch.inf)

    def dense_logits(self) -> Float[Tensor, "b h q k"] | None:
        """Return all that is added to q·kᵀ·scale, masks as −inf; None when nothing is.

        Each axis has its full length or 1. This is the n × n tensor that other backends avoid.
        """
        vector, logits = self.offset_logits(windowed=self.always is None), None
        if vector is not None and not self.packed:
            logits = to_matrix(vector, *self.lengths).unsqueeze(0)
        if self.packed:
            queries = self.query.shape[0]
            if vector is None:
                vector = self.query.new_zeros(1, span(*self.lengths), dtype=self.dtype)
            # Offsets longer than any sequence join tokens of different ones: any value will do.
            vector = recentred(vector, self.max_seqlen, queries)
            logits = to_matrix(vector, queries, queries).unsqueeze(0)
            logits = logits.masked_fill(~self.same_sequence(), -torch.inf)
        if self.always is not None:
            if logits is None:
                logits = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.query.device)
            logits = logits.masked_fill(self._beyond_the_window(), -torch.inf)
        if self.key_scores is not None:
            columns = self.key_scores.T.unsqueeze(0) if self.packed else self.key_scores
            columns = columns.to(self.dtype).unsqueeze(2)
            logits = columns if logits is None else logits + columns
        if self.attn_mask is None:
            return logits
        if logits is None:
            logits = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.query.device)
        if self.attn_mask.dtype == torch.bool:
            return logits.masked_fill(~self.attn_mask, -torch.inf)
        return logits + hiding(self.attn_mask, self.dtype)

    def _beyond_the_window(self) -> Bool[Tensor, "b 1 q k"]:
        assert self.always is not None
        axis = 0 if self.packed else 2
        queries, keys, start = self.query.shape[axis], self.key.shape[axis], self.query_start
        i = torch.arange(queries, device=self.query.device)
        j = torch.arange(keys, device=self.query.device)
        if self.packed:
            assert self.cu_seqlens is not None
            # Of a packed token its place in its own sequence.
            number = self.sequence_of_token().clamp_min(0)
            own = j - self.cu_seqlens[number]
            shown = (self.always[number] == own.unsqueeze(-1)).any(-1).unsqueeze(0)
        else:
            shown = (self.always.unsqueeze(-1) == j).any(1)
        seen = visible(offset_of(i[:, None], j[None, :], start), self.window)
        if seen is None:
            seen = torch.ones(1, 1, dtype=torch.bool, device=self.query.device)
        return ~(seen[None, None] | shown[:, None, None, :])

    def sequence_of_token(self) -> Int[Tensor, " total"]:
        """Return the number of each packed token's sequence; −1 after the last one."""
        assert self.cu_seqlens is not None
        tokens = torch.arange(self.query.shape[0], device=self.query.device)
        number = torch.searchsorted(self.cu_seqlens[1:].long(), tokens, right=True)
        return torch.where(number < self.cu_seqlens.shape[0] - 1, number, -1)

    def same_sequence(self) -> Bool[Tensor, "total total"]:
        """Return which tokens of a packed batch may see each other."""
        number = self.sequence_of_token()
        return (number[:, None] == number[None, :]) & (number >= 0)


def hides_below(dtype: torch.dtype) -> float:
    """Return the number of an added mask of that dtype from which on it hides as −inf does.

    The lowest of float16; of wider dtypes −2¹²⁷, which the lowest of float32 and bfloat16 are below
    in either of them. Model libraries write "hidden" so.
    """
    return -65504.0 if dtype == torch.float16 else -(2.0**127)


def hiding(mask: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return an added mask in the dtype of the logits, −inf where it hides."""
    return torch.where(mask <= hides_below(mask.dtype), -torch.inf, mask.to(dtype))


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def forward_mode() -> bool:
    """Whether forward-mode derivatives (jvp) are being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether torch.func or forward-mode derivatives look into the call."""
    # Not `is not None`: torch.compile wraps what it finds, and finds something where there is None.
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return forward_mode() or isinstance(interpreter, torch._C._functorch.CInterpreter)


def plain(*tensors: object) -> bool:
    """Whether these are ordinary tensors (or None) in eager code that nothing looks into."""
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in PLAIN for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and not transformed()
    )


def likeness(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return all that a check, a choice or a compiled kernel asks of tensors, but their numbers."""
    return tuple(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0)
        for t in tensors
    )


def exporting() -> bool:
    """Whether the graph is made for torch.export, to be run without this package."""
    # Not torch.compiler.is_exporting(): up to PyTorch 2.11 a graph for torch.compile is told "yes".
    return torch.compiler._is_exporting_flag


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for that device; asking for "meta" is an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which dtypes are left as they are.

    One that does nothing where autocast is off: an exported graph would keep the other one as a
    graph of its own.
    """
    if autocast_enabled(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
