"""Attention of equally long sequences, block by block: what `chunked` is made of.

A block holds some queries of some heads against all the keys they may see. Unusual: queries run
backwards inside a block, last one first. Upside down, the block of the Toeplitz matrix is a view of
the score vector (`offsets.block_view`), and its gradient is a sum over the rows of a sheared view
(`offsets.add_block_diagonals`): neither is ever written out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tisa.offsets import Window, add_block_diagonals, block_view, visible_keys
from tisa.ops.call import hiding
from tisa.ops.dropout import kept, kept_scale

# (logits, queries) of a block. Enough for fast matrix products; on a CPU few enough for its cache,
# on an accelerator enough to outweigh the launches (benchmarks/blocks.py and its records).
CPU_BLOCK = (2**20, 256)
ACCELERATOR_BLOCK = (2**25, 256)
LOG2_E = math.log2(math.e)
SMALL_SCORE = 16.0


def exponential(x: Tensor) -> Tensor:
    """Return e to the power of each entry, in its place."""
    if x.device.type == "cpu":
        # PyTorch's own takes 3 times as long on a CPU, and up to 80 times where it underflows.
        return x.mul_(LOG2_E).exp2_()
    return x.exp_()


def small(scores: Tensor) -> bool:
    """Return whether a product may be summed on top of scores; told without a device's answer.

    Each of its terms is then rounded at their size, which for scores of 1e4 is a digit that counts.
    """
    if scores.device.type != "cpu" or not scores.numel():
        return False
    return float(scores.masked_fill(scores == -torch.inf, 0.0).abs().max()) <= SMALL_SCORE


@dataclass
class Block:
    """Queries [i0, i1) of heads [h0, h1) in batch [b0, b1), against keys [j0, j1)."""

    b0: int
    b1: int
    h0: int
    h1: int
    i0: int
    i1: int
    j0: int
    j1: int


@dataclass
class Blocks:
    """Equally long sequences: (batch, heads, length, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    vector: Tensor | None
    mask: Tensor | None
    key_scores: Tensor | None
    seed: Tensor | None
    first_token: int
    # Position of the first query; None where only the device knows it: no key is left out then, and
    # the −inf in the vector hides what has to be hidden.
    query_start: int | None
    window: Window
    scale: float
    dropout_p: float

    def __post_init__(self) -> None:
        self.dtype = torch.promote_types(self.query.dtype, torch.float32)
        self.batch, heads, self.queries, _ = self.query.shape
        self.key_heads, self.keys = self.key.shape[1:3]
        self.group = heads // max(1, self.key_heads)
        # A lane is one key head of one sequence; a block takes consecutive lanes.
        self.key_lanes = self.key.to(self.dtype).flatten(0, 1)
        self.value_lanes = self.value.to(self.dtype).flatten(0, 1)
        self.scratch: dict[str, Tensor] = {}
        given = [x for x in (self.vector, self.key_scores) if x is not None]
        self.are_small = bool(given) and all(map(small, given))

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, those without any key left out."""
        on_cpu = self.query.device.type == "cpu"
        elements, rows = CPU_BLOCK if on_cpu else ACCELERATOR_BLOCK
        rows = max(1, min(self.queries, rows))
        width = self.keys
        left, right = self.window
        if self.query_start is not None and left is not None and right is not None:
            width = min(width, max(1, rows + left + right))
        rows = max(1, min(rows, elements // max(1, self.group * width)))
        lanes = max(1, elements // max(1, rows * self.group * width))
        head_step = min(lanes, self.key_heads)
        batch_step = max(1, lanes // max(1, self.key_heads))
        for b0 in range(0, self.batch, batch_step):
            for h0 in range(0, self.key_heads, head_step):
                for i0 in range(0, self.queries, rows):
                    i1 = min(i0 + rows, self.queries)
                    j0, j1 = 0, self.keys
                    if self.query_start is not None:
                        j0, j1 = visible_keys((i0, i1), self.keys, self.query_start, self.window)
                    if j0 < j1:
                        yield Block(
                            b0,
                            min(b0 + batch_step, self.batch),
                            h0,
                            min(h0 + head_step, self.key_heads),
                            i0, i1, j0, j1,
                        )  # fmt: skip

    def space(self, name: str, *shape: int) -> Tensor:
        """Return uninitialised memory that the next block uses again."""
        needed = torch.Size(shape).numel()
        if name not in self.scratch or self.scratch[name].numel() < needed:
            self.scratch[name] = torch.empty(needed, dtype=self.dtype, device=self.query.device)
        return self.scratch[name][:needed].view(shape)

    def rows(self, tensor: Tensor, block: Block) -> Tensor:
        """Return a block's rows of a (batch, heads, queries, …) tensor, last row first."""
        heads = slice(block.h0 * self.group, block.h1 * self.group)
        part = tensor[block.b0 : block.b1, heads, block.i0 : block.i1]
        return part.flip(2).to(self.dtype)

    def lanes(self, part: Tensor) -> Tensor:
        """Return (batch, heads, rows, dim) as (lanes, group · rows, dim)."""
        count = part.shape[0] * part.shape[1] // self.group
        return part.reshape(count, self.group * part.shape[2], part.shape[-1])

    def keys_of(self, lanes: Tensor, block: Block) -> Tensor:
        """Return a block's keys of a (lanes, keys, dim) tensor: a view."""
        first = block.b0 * self.key_heads + block.h0
        count = (block.b1 - block.b0) * (block.h1 - block.h0)
        return lanes[first : first + count, block.j0 : block.j1]

    def heads_of(self, vector: Tensor, block: Block) -> Tensor:
        """Return a block's heads of a (heads, span) tensor, which one may stand for: a view."""
        if vector.shape[0] == 1:
            return vector
        return vector[block.h0 * self.group : block.h1 * self.group]

    def logits(self, block: Block, query: Tensor) -> Tensor:
        """Return the logits of a block, (batch, heads, rows, keys), last row first."""
        rows, keys = block.i1 - block.i0, block.j1 - block.j0
        lanes = self.space("logits", query.shape[0], query.shape[1], keys)
        logits = lanes.view(block.b1 - block.b0, -1, rows, keys)
        columns = self.keys_of(self.key_lanes, block).transpose(1, 2)
        added = self.added(block)
        if self.are_small:
            # The product is added to the scores: one pass over the block less.
            if len(added) == 1:
                logits.copy_(added[0])
            else:
                torch.add(*added, out=logits)
            lanes.baddbmm_(query, columns)
        else:
            torch.bmm(query, columns, out=lanes)
            for scores in added:
                logits += scores
        if self.mask is not None:
            part = self.mask_of(self.mask, block).flip(2)
            if part.dtype == torch.bool:
                logits.masked_fill_(~part, -torch.inf)
            else:
                logits += hiding(part, self.dtype)
        return logits

    def added(self, block: Block) -> list[Tensor]:
        """Return the scores of offsets and those of keys, as far as there are any: views."""
        found = []
        if self.vector is not None:
            heads = self.heads_of(self.vector, block)
            sides = (block.i0, block.i1), (block.j0, block.j1)
            found.append(block_view(heads, self.queries, *sides))
        if self.key_scores is not None:
            found.append(self.columns_of(self.key_scores, block).unsqueeze(2))
        return found

    def columns_of(self, key_scores: Tensor, block: Block) -> Tensor:
        """Return a block's part of a (batch, heads, keys) tensor: a view."""
        heads = slice(block.h0 * self.group, block.h1 * self.group)
        return key_scores[block.b0 : block.b1, heads, block.j0 : block.j1]

    def mask_of(self, mask: Tensor, block: Block) -> Tensor:
        """Return a block's part of a mask, whose axes may be 1 long: a view."""
        heads = (block.h0 * self.group, block.h1 * self.group)
        cuts = ((block.b0, block.b1), heads, (block.i0, block.i1), (block.j0, block.j1))
        for axis, (first, last) in enumerate(cuts):
            if mask.shape[axis] != 1:
                mask = mask.narrow(axis, first, last - first)
        return mask

    def kept(self, block: Block, shape: torch.Size) -> Tensor:
        """Return 1 for the weights of a block that dropout keeps, else 0.

        To multiply by them is many times as fast as to fill by a mask.
        """
        assert self.seed is not None

        def index(first: int, last: int) -> Tensor:
            return torch.arange(first, last, device=self.query.device)

        return kept(
            self.seed,
            self.dropout_p,
            batch=index(block.b0, block.b1),
            head=index(block.h0 * self.group, block.h1 * self.group),
            query=index(block.i0, block.i1).flip(0) + self.first_token,
            key=index(block.j0, block.j1) + self.first_token,
            out=self.space("kept", *shape),
        )

    def forward(self, output: Tensor, lse: Tensor, norms: Tensor) -> None:
        """Fill the results; those of queries that see nothing are left as they are."""
        for block in self.blocks():
            query = self.lanes(self.rows(self.query, block)) * self.scale
            logits = self.logits(block, query)
            peak = logits.amax(-1, keepdim=True)
            peak.masked_fill_(peak == -torch.inf, 0.0)
            weights = exponential(logits.sub_(peak))
            total = weights.sum(-1, keepdim=True)
            if self.seed is not None:
                weights *= self.kept(block, weights.shape)
            lanes = weights.view(*query.shape[:2], -1)
            mixed = torch.bmm(lanes, self.keys_of(self.value_lanes, block))
            mixed = mixed.view(*weights.shape[:3], -1)
            # A blind query has total 0 and, so, mixed 0.
            factor = 1.0 if self.seed is None else kept_scale(self.dropout_p)
            mixed *= factor / total.masked_fill(total == 0, 1.0)
            self._store(output, block, mixed)
            self._store(lse, block, (peak + total.log()).squeeze(-1))
            self._store(norms, block, torch.cat((peak, total), dim=-1))

    def backward(
        self,
        grad_output: Tensor,
        grad_lse: Tensor,
        norms: Tensor,
        grad_query: Tensor | None,
        grad_key: Tensor | None,
        grad_value: Tensor | None,
        grad_vector: Tensor | None,
        grad_mask: Tensor | None,
        grad_key_scores: Tensor | None,
    ) -> None:
        """Fill those gradients that are not None."""
        key_total = torch.zeros_like(self.key_lanes) if grad_key is not None else None
        value_total = torch.zeros_like(self.value_lanes) if grad_value is not None else None
        by_logits = (grad_query, grad_key, grad_vector, grad_mask, grad_key_scores)
        logits_wanted = any(g is not None for g in by_logits)
        for block in self.blocks():
            query = self.lanes(self.rows(self.query, block)) * self.scale
            peak, total = self.rows(norms, block).split(1, dim=-1)
            # Weights are left unnormalised; what they are multiplied by is divided instead, which
            # is a row and not a block. A blind query has weights 0 and total 0.
            total = total.masked_fill(total == 0, 1.0)
            upstream = self.lanes(self.rows(grad_output, block) / total)
            weights = exponential(self.logits(block, query).sub_(peak))
            rows, keys = weights.shape[2:]
            kept = self.kept(block, weights.shape) if self.seed is not None else None
            if kept is not None:
                upstream *= kept_scale(self.dropout_p)
            if value_total is not None:
                used = weights
                if kept is not None:
                    used = torch.mul(weights, kept, out=self.space("used", *weights.shape))
                used_lanes = used.view(*query.shape[:2], keys)
                self.keys_of(value_total, block).baddbmm_(used_lanes.transpose(1, 2), upstream)
            if not logits_wanted:
                continue
            by_weight = self.space("by_weight", *query.shape[:2], keys)
            values = self.keys_of(self.value_lanes, block)
            torch.bmm(upstream, values.transpose(1, 2), out=by_weight)
            by_weight = by_weight.view(weights.shape)
            if kept is not None:
                by_weight *= kept
            # dS = P·(dP − Σ P·dP + dlse). Zeros to the right of each row let the diagonals be
            # summed without another copy.
            padded = self.space("by_logit", *weights.shape[:3], keys + rows)
            padded[..., keys:].zero_()
            by_logit = torch.mul(weights, by_weight, out=padded[..., :keys])
            mean = by_logit.sum(-1, keepdim=True) - self.rows(grad_lse, block).unsqueeze(-1)
            by_logit.addcmul_(weights, mean / total, value=-1)
            if grad_mask is not None:
                part = self.mask_of(grad_mask, block)
                part += by_logit.flip(2).sum_to_size(part.shape)
            if grad_key_scores is not None:
                columns = self.columns_of(grad_key_scores, block)
                columns += by_logit.sum(2)
            by_logit = padded.view(*query.shape[:2], keys + rows)[..., :keys]
            if key_total is not None:
                self.keys_of(key_total, block).baddbmm_(by_logit.transpose(1, 2), query)
            if grad_query is not None:
                found = torch.bmm(by_logit, self.keys_of(self.key_lanes, block)) * self.scale
                self._store(grad_query, block, found.view(*weights.shape[:3], -1))
            if grad_vector is not None:
                add_block_diagonals(
                    self.heads_of(grad_vector, block),
                    padded,
                    self.queries,
                    (block.i0, block.i1),
                    (block.j0, block.j1),
                )
        if grad_key is not None and key_total is not None:
            grad_key.copy_(key_total.view(grad_key.shape))
        if grad_value is not None and value_total is not None:
            grad_value.copy_(value_total.view(grad_value.shape))

    def _store(self, target: Tensor, block: Block, rows: Tensor) -> None:
        heads = slice(block.h0 * self.group, block.h1 * self.group)
        target[block.b0 : block.b1, heads, block.i0 : block.i1] = rows.flip(2)
