"""Shape types for annotations: jaxtyping's where it is installed, plain `Tensor` where it is not.

`Float[Tensor, "heads span"]` documents a shape, and the tests check it on every call
(jaxtyping + beartype). Running the library needs torch alone.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Int32
else:
    try:
        from jaxtyping import Bool, Float, Int, Int32
    except ImportError:

        class _AnyShape:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Int32 = _AnyShape

# What a layer and its position method hand to each other.
Scores = Float[Tensor, "heads span"]
Hidden = Float[Tensor, "batch queries hidden"]
Embeddings = Float[Tensor, "*batch tokens width"]
Heads = Float[Tensor, "*batch tokens heads dim"]
Queries = Float[Tensor, "batch heads queries dim"]
Logits = Float[Tensor, "batch_or_1 heads queries keys"]
Weights = Float[Tensor, "batch heads queries keys"]

__all__ = [
    "Bool", "Embeddings", "Float", "Heads", "Hidden", "Int", "Int32", "Logits", "Queries", "Scores",
    "Tensor", "Weights",
]  # fmt: skip
