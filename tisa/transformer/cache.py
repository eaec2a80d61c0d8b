"""Keys, values and scores of the tokens so far, for a decoder that reads token after token."""

import torch

from tisa.shapes import Float, Tensor


class Cache:
    """What each layer (or each pass through a shared layer) has seen; starts empty, grows.

    Layers are told apart by their number: one cache serves all layers of a transformer that counts
    them.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_scores: dict[int, Tensor] = {}

    def length_of(self, layer: int) -> int:
        """Return the number of tokens that a layer has seen."""
        return self.values[layer].shape[-2] if layer in self.values else 0

    @property
    def length(self) -> int:
        """The number of tokens that the layer which is farthest has seen."""
        return max((self.length_of(layer) for layer in self.values), default=0)

    def extend(
        self,
        layer: int,
        key: Float[Tensor, "batch heads new dim"] | None,
        value: Float[Tensor, "batch heads new dim"],
    ) -> tuple[Float[Tensor, "batch heads keys dim"] | None, Float[Tensor, "batch heads keys dim"]]:
        """Return all keys and values of the layer, the new ones last, and remember them.

        Keys are None for a method that never looks at them.
        """
        if layer in self.values:
            value = torch.cat((self.values[layer], value), dim=-2)
            if key is not None:
                key = torch.cat((self.keys[layer], key), dim=-2)
        self.values[layer] = value
        if key is not None:
            self.keys[layer] = key
        return key, value

    def extend_scores(
        self, layer: int, scores: Float[Tensor, "batch heads new"]
    ) -> Float[Tensor, "batch heads keys"]:
        """Return the scores of all keys of the layer, the new ones last, and remember them."""
        if layer in self.key_scores:
            scores = torch.cat((self.key_scores[layer], scores), dim=-1)
        self.key_scores[layer] = scores
        return scores
