"""What every scoring function f_θ(k) is: integer offsets in, one float32 score per head out.

- Scores are computed in float32 whatever the model's dtype. `.half()`, `.bfloat16()` and
  `.to(torch.bfloat16)` move the parameters but leave them float32; `.double()` makes them float64.
  In bfloat16 the offsets above 256 would collapse into each other.
- `support(eps)` bounds the score *and its derivative by every parameter*, so that an attention
  kernel which skips the offsets outside the band still trains every parameter.
- `parabola_support(eps, reach)` says from where on the curve is as good as a parabola over short
  stretches, for functions whose tails never become constant.
- Where there is a choice of initial values it is an argument, `init`; every class says what its
  scores are at step 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from tisa.offsets import offset_range, to_matrix
from tisa.shapes import Float, Int, Int32, Tensor

Init = Literal["reference", "zero"]

# Bands end here: far beyond any sequence, and sums of two such numbers still fit an int32.
FARTHEST = 2**30


def check_flags(owner: str, **flags: object) -> None:
    """Refuse flags that are no booleans: "no" and a number would be taken as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(
                f"{owner}: {name} must be True or False, got {flag!r}; "
                "pass bool(…) of what you mean"
            )


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what `Module._apply` does to a tensor, but never below float32."""

    def kept(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.dtype in (torch.float16, torch.bfloat16):
            # From `tensor`, not from `moved`, which has already lost the low bits.
            return tensor.to(device=moved.device, dtype=torch.float32)
        return moved

    return kept


class ScoringFunction(nn.Module, ABC):
    """A function of the offset, one curve per head; subclasses define `scores` and `support`."""

    _place: Tensor

    def __init__(self, num_attention_heads: int = 12) -> None:
        super().__init__()
        if num_attention_heads < 1:
            raise ValueError(
                f"{type(self).__name__}: num_attention_heads must be at least 1, "
                f"got {num_attention_heads}"
            )
        self.num_attention_heads = num_attention_heads
        # Empty: it only says on which device and in which dtype the scores are wanted, also for
        # functions that have no parameter to ask.
        self.register_buffer("_place", torch.empty(0, dtype=torch.float32), persistent=False)

    @abstractmethod
    def scores(self, offsets: Int[Tensor, "*shape"]) -> Float[Tensor, "heads *shape"]:
        """Return the score of each offset for each head."""

    @abstractmethod
    def support(self, eps: float) -> Int32[Tensor, "heads 2"] | None:
        """Return each head's band [lowest, highest] of offsets, or None where there is none.

        On either side of the band the score and its derivative by every parameter are constant
        within `eps`. Computed on the device from the present parameters, without a synchronisation:
        a head whose parameters are not finite (a training that diverged) is not refused, its band
        is everything.
        """

    def parabola_support(self, eps: float, reach: int) -> Int32[Tensor, "heads 2"] | None:
        """Return each head's band outside which parabolas stand for the curve, or None.

        On either side, wherever all offsets from c − reach to c + reach lie outside of the band,
        the parabola through three of the values there (`scoring.parabolas`) is within `eps` of the
        score, and that of its derivative by a parameter within `eps` or, where derivatives are
        larger than 1, within `eps` of the largest. Computed as `support` is.

        What is within eps/4 of a constant is: the three values lift an error by at most 2.4.
        """
        return self.support(eps / 4)

    def band(self, dtype: torch.dtype) -> Int32[Tensor, "heads 2"] | None:
        """Return the band for `tisa.attention` with inputs of that dtype.

        Outside it scores differ from constants by less than a sixteenth of the dtype's rounding,
        so that leaving them out changes no result more than rounding it does.
        """
        return self.support(torch.finfo(dtype).eps / 16)

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        query_start: int | Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "heads span"]:
        """Return the score vector that `tisa.attention` takes, in the order of `tisa.offsets`."""
        key_length = query_length if key_length is None else key_length
        return self.scores(
            offset_range(
                query_length, key_length, query_start=query_start, device=self._place.device
            )
        )

    def matrix(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        query_start: int | Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "heads queries keys"]:
        """Return the dense scores, to add to the logits of an attention of your own."""
        key_length = query_length if key_length is None else key_length
        vector = self(query_length, key_length, query_start=query_start)
        return to_matrix(vector, query_length, key_length)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"num_attention_heads={self.num_attention_heads}"

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of the authors' checkpoint; a function without any refuses."""
        raise ValueError(f"{type(self).__name__}: its authors published no weights for it")

    @property
    def _dtype(self) -> torch.dtype:
        # Whatever reached the module on other ways than `_apply`, scores are at least float32.
        return torch.promote_types(self._place.dtype, torch.float32)

    def _distances(self, offsets: Tensor) -> Tensor:
        """Return the offsets as floats of the dtype in which scores are computed."""
        if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
            raise TypeError(
                f"{type(self).__name__}.scores: offsets must be an integer tensor (key − query), "
                f"got {offsets.dtype}; convert them with .long()"
            )
        return offsets.to(self._dtype)

    def _bands(self, lowest: Tensor, highest: Tensor) -> Tensor:
        """Return (heads, 2) bands in int32 from real ends, rounded outwards."""
        ends = torch.stack((lowest.floor(), highest.ceil()), dim=-1)
        return ends.clamp(-FARTHEST, FARTHEST).to(torch.int32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScoringFunction":
        return super()._apply(at_least_float32(fn), recurse)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        # Built on "meta" and given its parameters: the place is in no checkpoint and follows them.
        if self._place.is_meta and local_metadata.get("assign_to_params_buffers", False):
            devices = [p.device for p in self.parameters(recurse=False)]
            device = devices[0] if devices else torch.device("cpu")
            self._place = torch.empty(0, dtype=self._place.dtype, device=device)


def head_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter without values yet, in float32 whatever torch's default dtype is."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))


def check_init(owner: ScoringFunction, init: str) -> None:
    """Refuse an unknown choice of initial values."""
    if init not in ("reference", "zero"):
        raise ValueError(
            f'{type(owner).__name__}: init must be "reference" or "zero", got {init!r}'
        )
