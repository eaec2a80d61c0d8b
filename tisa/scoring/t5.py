"""T5: one learned score per bucket of offsets (Raffel et al., JMLR 2020)."""

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding

from tisa.scoring.base import Init, ScoringFunction, check_flags, check_init, head_parameter
from tisa.scoring.published import fill, groups, only
from tisa.shapes import Float, Int, Int32, Tensor


class T5Buckets(ScoringFunction):
    """T5's scores: one learned number per head and bucket of offsets, exact near, logarithmic far.

    Parameter: `bucket_scores` (heads, buckets). Bidirectional: half of the buckets per sign.
    Causal (`bidirectional=False`): all buckets for the past; the future shares the bucket of 0.

    At step 0:
        init="reference": N(0, 512^−½), as in T5-small: every bucket slightly different.
        init="zero": no positions; every bucket that occurs gets a gradient in the first step.
    """

    def __init__(
        self,
        num_attention_heads: int = 12,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
        init: Init = "reference",
    ) -> None:
        super().__init__(num_attention_heads)
        check_flags("T5Buckets", bidirectional=bidirectional)
        self.per_side = num_buckets // 2 if bidirectional else num_buckets
        if num_buckets < 2 or (bidirectional and num_buckets % 2) or self.per_side < 2:
            raise ValueError(
                "T5Buckets: num_buckets must be at least 2, and even and at least 4 when "
                f"bidirectional, got {num_buckets}"
            )
        self._exact = self.per_side // 2
        if max_distance <= self._exact:
            raise ValueError(
                f"T5Buckets: max_distance must be above {self._exact} (the offsets with a bucket "
                f"of their own), got {max_distance}"
            )
        check_init(self, init)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.init = init
        self._thresholds = self._bucket_starts()
        self.bucket_scores = head_parameter(num_attention_heads, num_buckets)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        with torch.no_grad():
            self.bucket_scores.normal_(0.0, 512**-0.5)
            if self.init == "zero":
                self.bucket_scores.zero_()

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take T5's table: mesh-tensorflow's (heads, buckets), or transformers' (buckets, heads).

        An encoder's or a decoder's: a checkpoint of both has two.
        """
        name = "relative_attention_bias"
        of_transformers = any(key.endswith(f"{name}.weight") for key in state_dict)
        name = f"{name}.weight" if of_transformers else name
        table = only(groups("T5Buckets", state_dict, (name,)), "T5Buckets")[name]
        values = {"bucket_scores": table.T if of_transformers else table}
        fill(self, values, "give its num_buckets and heads")

    def _bucket_starts(self) -> list[int]:
        """Return the distances at which the logarithmic buckets after the first one begin.

        Bucket e + n begins where e·(max/e)^(n/(B−e)) is reached (e exact ones, B per side); in
        integers, so that no rounding of a logarithm decides: m^(B−e)·e^n ≥ max^n·e^(B−e).
        """
        exact, logarithmic = self._exact, self.per_side - self._exact
        starts = []
        m = exact
        for n in range(1, logarithmic):
            while m**logarithmic * exact**n < self.max_distance**n * exact**logarithmic:
                m += 1
            starts.append(m)
        return starts

    def buckets(self, offsets: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the bucket of each offset."""
        distance = offsets.abs() if self.bidirectional else (-offsets).clamp_min(0)
        bucket = distance.clamp_max(self._exact)
        for start in self._thresholds:
            bucket = bucket + (distance >= start)
        if self.bidirectional:
            bucket = bucket + self.per_side * (offsets > 0)
        return bucket

    @property
    def farthest(self) -> int:
        """The distance from which on the last bucket holds all the rest."""
        return self._thresholds[-1] if self._thresholds else self._exact

    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return the score of each offset's bucket for each head."""
        table = self.bucket_scores.to(self._distances(offsets).dtype)
        flat = by_bucket(table, self.buckets(offsets.long()).reshape(-1))
        return flat.reshape(self.num_attention_heads, *offsets.shape)

    def support(self, eps: float) -> Int32[Tensor, "heads 2"]:
        """Return the offsets from which on the last buckets hold all the rest, exactly."""
        ends = (-self.farthest, self.farthest if self.bidirectional else 0)
        # Filled on the device: a copy from the host could not be captured in a CUDA graph.
        heads, device = (self.num_attention_heads,), self._place.device
        return torch.stack(
            [torch.full(heads, end, dtype=torch.int32, device=device) for end in ends], dim=-1
        )

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return (
            f"{super().extra_repr()}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}, "
            f"init={self.init!r}"
        )


def by_bucket(
    table: Float[Tensor, "heads buckets"], buckets: Int[Tensor, " span"]
) -> Float[Tensor, "heads span"]:
    """Return the score of each offset's bucket: `table[:, buckets]`, with another gradient.

    That of the index adds up a bucket's thousands of offsets one after the other on a GPU. This one
    adds many at a time, always in the same order.
    """
    if not torch.compiler.is_compiling():
        return embedding(buckets, table.T).T.contiguous()
    # Compiled, the gradient of either would be atomic additions; nothing of this is written out.
    rows = torch.arange(table.shape[1], device=table.device).unsqueeze(-1)
    return torch.where(buckets == rows, table.unsqueeze(-1), 0.0).sum(1)
