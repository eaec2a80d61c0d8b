"""FoX: attention with a forget gate (Lin et al., "Forgetting Transformer", ICLR 2025)."""

from collections.abc import Mapping

from torch.nn.functional import logsigmoid

from tisa.positions.gates import Gated
from tisa.shapes import Float, Tensor


class Fox(Gated):
    """Logits q_i·k_j/√d + Σ_{j < l ≤ i} log f_l, a gate f_l = σ(w·x_l + b) of each token and head.

    A token whose gate is near 0 hides all before it from all after it. There is no other position.
    Parameters: `gates`, w and b of each layer and head. At step 0 b is 0 and w ~ N(0, 0.02), as in
    the authors' code: a token forgets about half.

    The authors' "Pro" block (output gate and norm, normed queries and keys, shifted keys and
    values) is another transformer around the same gate, and not here.
    """

    def steps(
        self, gates: Float[Tensor, "*batch tokens heads"]
    ) -> Float[Tensor, "*batch tokens heads"]:
        """Return −log f."""
        return -logsigmoid(gates)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the authors' `fgate_proj` of every layer."""
        self.read_gates(state_dict, "fgate_proj")
