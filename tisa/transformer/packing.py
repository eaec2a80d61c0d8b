"""Packed batches: sequences end to end, no padding, no attention from one to another.

Most methods work on the packed batch itself. The ones that need logits of every pair get it padded,
and their output is packed again.
"""

from dataclasses import dataclass

import torch

from tisa.positions import Places
from tisa.shapes import Bool, Float, Int, Int32, Tensor


@dataclass(frozen=True)
class Packing:
    """Sequence s of a packed batch is the tokens from cu_seqlens[s] to cu_seqlens[s + 1]."""

    cu_seqlens: Int32[Tensor, " ends"]
    max_seqlen: int
    sequence: Int[Tensor, " total"]
    positions: Int[Tensor, " total"]

    def places(self) -> Places:
        """Return where the tokens stand: positions begin at 0 with every sequence."""
        return Places(self.max_seqlen, self.max_seqlen, 0, self.positions)

    def pad(self, packed: Float[Tensor, "total *rest"]) -> Float[Tensor, "batch length *rest"]:
        """Return a padded batch, zeros after the end of a sequence."""
        rest = packed.shape[1:]
        padded = packed.new_zeros(self.cu_seqlens.shape[0] - 1, self.max_seqlen, *rest)
        return padded.index_put((self.sequence, self.positions), packed)

    def unpad(self, padded: Float[Tensor, "batch length *rest"]) -> Float[Tensor, "total *rest"]:
        """Return the packed batch again."""
        return padded[self.sequence, self.positions]

    def mask(self) -> Bool[Tensor, "batch length"]:
        """Return which places of the padded batch hold a token."""
        lengths = self.cu_seqlens.diff()
        places = torch.arange(self.max_seqlen, device=lengths.device)
        return places < lengths.unsqueeze(-1)


def packing_of(total: int, cu_seqlens: Int32[Tensor, " ends"], max_seqlen: int) -> Packing:
    """Return the packing of `total` tokens, all of which must belong to a sequence."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens.long()
    # Of all ends, not of a slice, which Inductor up to PyTorch 2.11 cannot search on a GPU.
    sequence = torch.searchsorted(ends, tokens, right=True) - 1
    covered = ends[-1] == total
    # Here, since what places tokens by these numbers would put them anywhere, or nowhere.
    rising = (ends[0] == 0) & (ends.diff() >= 0).all()
    fits = (ends.diff() <= max_seqlen).all()
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        # One question, so that one small kernel asks it.
        torch._assert_async(
            covered & rising & fits,
            "cu_seqlens must rise from 0 to the number of tokens, by max_seqlen at most",
        )
    elif not covered:
        raise ValueError(
            f"cu_seqlens must end with the number of tokens, {total}, got {int(ends[-1])}; "
            "leave padding out of a packed batch"
        )
    elif not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0, got {ends.tolist()}; they are the ends of the "
            "sequences, after a leading 0"
        )
    elif not fits:
        raise ValueError(
            f"max_seqlen must be at least the longest sequence's length, {int(ends.diff().max())}, "
            f"got {max_seqlen}"
        )
    return Packing(cu_seqlens, max_seqlen, sequence, tokens - ends[sequence])
