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

__all__ = ["Bool", "Float", "Int", "Int32", "Tensor"]
