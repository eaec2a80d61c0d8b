"""CABLE: "Context-aware Biases for Length Extrapolation" (Veisi et al., EMNLP 2025)."""

from collections.abc import Mapping

from torch.nn.functional import relu, softplus

from tisa.positions.base import Layers, PositionConfig, Variant, check_variant
from tisa.positions.gates import Gated
from tisa.shapes import Float, Tensor


class Cable(Gated):
    """Logits q_i·k_j/√d − (S_i − S_j), S the cumulative sum of relu(w·x_l) ≥ 0 over the tokens.

    This is the paper's CABLE without weights (CABLE_NW, its first version). In the published paper
    the difference is also multiplied by softplus(v·x_i), a number of the query: a product of the
    contents of two tokens, which is no score of the key and not here. Nor is its kernelised form,
    −log(1 + (S_i − S_j)²). (The paper writes S_i − S_j and means a penalty.)

    `variant="author"`: the steps of the authors' code, softplus(w·x_l + b). As softplus(z) is
    −log σ(−z), that is `Fox` with the signs of w and b changed. Parameters: `gates`, w (and b) of
    each layer and head, N(0, 0.02) and 0 at step 0.
    """

    def __init__(
        self, config: PositionConfig, *, variant: Variant = "paper", layers: Layers = "each"
    ) -> None:
        check_variant("Cable", variant)
        super().__init__(config, layers=layers, has_bias=variant == "author")
        self.variant = variant

    def steps(
        self, gates: Float[Tensor, "*batch tokens heads"]
    ) -> Float[Tensor, "*batch tokens heads"]:
        """Return how much a token adds to the sum."""
        return softplus(gates) if self.variant == "author" else relu(gates)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the authors' `h_attn` of every layer."""
        if self.variant == "paper":
            raise ValueError('Cable.from_reference: variant must be "author", got "paper"')
        self.read_gates(state_dict, "h_attn")

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"variant={self.variant!r}, {super().extra_repr()}"
