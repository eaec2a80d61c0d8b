"""Attention over a sequence that is spread over several processes: context parallelism.

Every process holds some tokens of each sequence. Keys and values go round in a ring; a process
attends to those that it has at the moment and joins the parts by their log-sum-exp. Scores of the
offset need nothing but where two pieces begin: block (a, b) of the score matrix is a slice of the
vector. Nothing is ever longer than a process's share but the score vector itself, heads · (2n − 1).

The backward pass goes round again, with the gradients of keys and values beside them:

    out = Σ_t w_t·out_t,  w_t = exp(lse_t − lse),
    dout_t = w_t·dout,    dlse_t = w_t·⟨dout, out_t − out⟩.

PyTorch's own context parallelism (torch.distributed.tensor.experimental.context_parallel, 2.11 and
2.13) replaces scaled_dot_product_attention by a ring of its own flash kernels, which take no bias,
or gathers all keys for FlexAttention, so it cannot carry scores; docs/pretraining.md says more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tisa.offsets import hold_outside, offset_range, span
from tisa.ops.api import attention
from tisa.ops.call import autocast_enabled
from tisa.ops.validation import autocast
from tisa.scoring.base import check_flags
from tisa.shapes import Float, Int, Int32, Tensor


@dataclass(frozen=True)
class Ring:
    """Which tokens of a sequence of `length` tokens this process holds.

    One piece for each process, or with `balanced` two, one from either end (0 and 3, 1 and 2 of
    four), so that in a causal model all of them have as much to do. `group` is a process group;
    None is all processes.
    """

    length: int
    balanced: bool = False
    group: Any = None

    def __post_init__(self) -> None:
        check_flags("Ring", balanced=self.balanced)
        if not dist.is_initialized():
            raise RuntimeError(
                "Ring: torch.distributed must be initialised; start the program with torchrun and "
                "call torch.distributed.init_process_group()"
            )
        if self.length < 1 or self.length % (self.processes * self.pieces):
            raise ValueError(
                f"Ring: length must be a multiple of {self.processes * self.pieces} (processes × "
                f"pieces of each), got {self.length}"
            )

    @property
    def processes(self) -> int:
        """How many processes share the sequence."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The place of this process in the ring."""
        return dist.get_rank(self.group)

    @property
    def pieces(self) -> int:
        """How many pieces a process holds."""
        return 2 if self.balanced else 1

    @property
    def piece(self) -> int:
        """The number of tokens in a piece."""
        return self.length // (self.processes * self.pieces)

    def starts(self, rank: int) -> list[int]:
        """Return where the pieces of a process begin."""
        if not self.balanced:
            return [rank * self.piece]
        return [rank * self.piece, (2 * self.processes - 1 - rank) * self.piece]

    def positions(self, device: torch.device | None = None) -> Int[Tensor, " tokens"]:
        """Return the positions of this process's tokens in the sequence."""
        inner = torch.arange(self.piece, device=device)
        return torch.cat([inner + start for start in self.starts(self.rank)])

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor that has the whole sequence along `dim`."""
        if whole.shape[dim] != self.length:
            raise ValueError(
                f"Ring.shard: the tensor must have {self.length} tokens along dim {dim}, got "
                f"{tuple(whole.shape)}"
            )
        return whole.index_select(dim, self.positions(whole.device))


def ring_attention(
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch key_heads tokens dim"],
    value: Float[Tensor, "batch key_heads tokens value_dim"],
    offset_scores: Float[Tensor, "heads span"] | None,
    ring: Ring,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    band: Int32[Tensor, "heads 2"] | None = None,
    key_scores: Float[Tensor, "batch heads tokens"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """Return `tisa.attention` of the whole sequence for this process's queries.

    Query, key, value and `key_scores` are this process's tokens; `offset_scores` spans the whole
    sequence, what a scoring function returns for `ring.length`. Cumulative sums behind `key_scores`
    run over the whole sequence too, from process to process. All processes of the ring must call
    it. The gradient of the offsets' scores is this process's share, as that of every other
    parameter is: add them up (DDP and FSDP do).
    """
    check_flags("ring_attention", is_causal=is_causal, enable_gqa=enable_gqa)
    tokens = ring.piece * ring.pieces
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4 or tensor.shape[-2] != tokens:
            raise ValueError(
                f"ring_attention: {name} must be (batch, heads, {tokens}, dim), this process's "
                f"tokens, got {tuple(tensor.shape)}; `ring.shard` cuts them out"
            )
    mine = tuple(query.shape[:3])
    if key_scores is not None and tuple(key_scores.shape) != mine:
        raise ValueError(
            f"ring_attention: key_scores must be (batch, heads, tokens) = {mine}, "
            f"this process's tokens with the query's heads, got {tuple(key_scores.shape)}; "
            "`ring.shard` cuts them out"
        )
    wanted = span(ring.length, ring.length)
    if offset_scores is not None and offset_scores.shape[-1] != wanted:
        raise ValueError(
            f"ring_attention: offset_scores must span the whole sequence, {wanted} offsets, got "
            f"{offset_scores.shape[-1]}; call the scoring function with {ring.length}"
        )
    if autocast_enabled(query.device):
        # Here, because the backward pass runs outside of autocast and must compute the same.
        query, key, value = (autocast(x) for x in (query, key, value))
    if offset_scores is not None and band is not None:
        # Of the whole vector: a piece far from the band does not have the band's edge in it.
        offsets = offset_range(ring.length, ring.length, device=offset_scores.device)
        offset_scores = hold_outside(offset_scores, band, offsets)
    how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "backend": backend}
    found: Tensor = _RingAttention.apply(
        query, key, value, offset_scores, key_scores, band, ring, how
    )
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        key_scores: Tensor | None,
        band: Tensor | None,
        ring: Ring,
        how: dict[str, Any],
    ) -> Tensor:
        parts = query.shape[-2] // ring.piece
        outputs: list[Tensor | None] = [None] * parts
        sums: list[Tensor | None] = [None] * parts
        given = (key, value) if key_scores is None else (key, value, key_scores)
        for owner, visiting in _around(ring, given):
            for a, b, far in _blocks(ring, owner, how["is_causal"]):
                part, lse = _attend(query, visiting, scores, band, ring, a, b, far, how)
                outputs[a], sums[a] = _joined(outputs[a], sums[a], part.to(lse.dtype), lse)
        whole = torch.cat([o for o in outputs if o is not None], dim=-2).to(query.dtype)
        total = torch.cat([s for s in sums if s is not None], dim=-1)
        ctx.save_for_backward(query, *given, scores, band, whole, total)
        ctx.ring, ctx.how = ring, how
        return whole

    # Without it, a second derivative would silently be 0.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, *given, scores, band, whole, total = ctx.saved_tensors
        ring, how, exact = ctx.ring, ctx.how, total.dtype
        by_query = torch.zeros_like(query, dtype=exact)
        by_scores = None if scores is None else torch.zeros_like(scores)
        rows = (gradient.to(exact) * whole.to(exact)).sum(-1)
        moving: tuple[Tensor, ...] = (
            *(x.contiguous() for x in given),
            *(x.new_zeros(x.shape, dtype=exact) for x in given),
        )
        for turn in range(ring.processes):
            visiting, by_visiting = moving[: len(given)], moving[len(given) :]
            owner = (ring.rank - turn) % ring.processes
            for a, b, far in _blocks(ring, owner, how["is_causal"]):
                q, *kv = (t.detach().requires_grad_() for t in (query, *visiting))
                s = None if scores is None else scores.detach().requires_grad_()
                with torch.enable_grad():
                    part, lse = _attend(q, tuple(kv), s, band, ring, a, b, far, how)
                here = slice(a * ring.piece, (a + 1) * ring.piece)
                weight = torch.exp(lse.detach() - total[..., here]).nan_to_num(0.0)
                by_part = gradient[..., here, :].to(exact) * weight.unsqueeze(-1)
                by_lse = (by_part * part.detach().to(exact)).sum(-1) - weight * rows[..., here]
                found = torch.autograd.grad(
                    (part, lse),
                    (q, *kv) if s is None else (q, *kv, s),
                    (by_part.to(part.dtype), by_lse),
                )
                by_query += found[0]
                for total_of, one in zip(by_visiting, found[1:], strict=False):
                    total_of += one
                if by_scores is not None:
                    by_scores += found[-1]
            # The last time round it brings the gradients home.
            moving = _shifted(ring, moving)
        home = [x.to(of.dtype) for x, of in zip(moving[len(given) :], given, strict=True)]
        by_key, by_value, by_key_scores = (*home, None)[:3]
        return (
            by_query.to(query.dtype), by_key, by_value, by_scores, by_key_scores, None, None, None
        )  # fmt: skip


def _attend(
    query: Tensor,
    visiting: tuple[Tensor, ...],
    scores: Tensor | None,
    band: Tensor | None,
    ring: Ring,
    a: int,
    b: int,
    distance: int,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of piece `a` of the queries and piece `b` of the keys.

    `visiting` is keys, values and, if there are any, the scores of keys; `distance` is how much
    later the queries begin than the keys.
    """
    size = ring.piece
    mine, theirs = slice(a * size, (a + 1) * size), slice(b * size, (b + 1) * size)
    key, value = (x[..., theirs, :] for x in visiting[:2])
    key_scores = visiting[2][..., theirs] if len(visiting) > 2 else None
    # Offsets of the block: −(size − 1) − distance … size − 1 − distance.
    first = ring.length - 1 - (size - 1) - distance
    cut = None if scores is None else scores[:, first : first + span(size, size)]
    found = attention(
        query[..., mine, :], key, value, cut, key_scores=key_scores,
        band=None if scores is None else band, query_start=distance, return_lse=True, **how,
    )  # fmt: skip
    assert isinstance(found, tuple)
    return found


def _blocks(ring: Ring, owner: int, is_causal: bool) -> list[tuple[int, int, int]]:
    """Return the pairs of own and visiting pieces that see each other, with their distance."""
    return [
        (a, b, mine - theirs)
        for a, mine in enumerate(ring.starts(ring.rank))
        for b, theirs in enumerate(ring.starts(owner))
        if not is_causal or theirs <= mine
    ]


def _joined(
    output: Tensor | None, total: Tensor | None, part: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of both parts together."""
    if output is None or total is None:
        return part, lse
    new = torch.logaddexp(total, lse)
    # −inf − (−inf): a query that sees nothing in either part.
    old_weight = torch.exp(total - new).nan_to_num(0.0).unsqueeze(-1)
    new_weight = torch.exp(lse - new).nan_to_num(0.0).unsqueeze(-1)
    return output * old_weight + part * new_weight, new


def _around(ring: Ring, tensors: tuple[Tensor, ...]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield each process's tensors as they come by, with whose they are."""
    moving = tuple(t.contiguous() for t in tensors)
    for turn in range(ring.processes):
        yield (ring.rank - turn) % ring.processes, moving
        if turn < ring.processes - 1:
            moving = _shifted(ring, moving)


def _shifted(ring: Ring, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of the process before, having sent these to the one after."""
    if ring.processes == 1:
        return tensors
    group = ring.group or dist.group.WORLD
    assert group is not None
    after = dist.get_global_rank(group, (ring.rank + 1) % ring.processes)
    before = dist.get_global_rank(group, (ring.rank - 1) % ring.processes)
    received = tuple(torch.empty_like(t) for t in tensors)
    operations = [dist.P2POp(dist.isend, t, after, ring.group) for t in tensors]
    operations += [dist.P2POp(dist.irecv, t, before, ring.group) for t in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
