"""Synthesizer: attention logits that no key is asked for (Tay et al., ICML 2021)."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from tisa.ops.call import exporting
from tisa.positions.base import (
    Layers,
    Position,
    PositionConfig,
    Prepared,
    Variant,
    check_variant,
)
from tisa.scoring.published import fill
from tisa.shapes import Float, Hidden, Logits, Queries, Tensor

Form = Literal["random", "factorised", "dense"]


class Synthesizer(Position):
    """Logits from a learned matrix or from each token alone, instead of q·k or mixed with it.

    - random: R, (layers, heads, n, n). N(0, 1) at step 0.
    - factorised: R₁R₂ᵀ, each (layers, heads, n, rank). Entries of the product ~ N(0, 1) at step 0.
    - dense: W₂ relu(W₁ x_i + b₁) + b₂ for token i, hidden → head width → n, for each head.

    `mixed` adds content attention: α₁·(this) + α₂·q·k/√d, (α₁, α₂) = softmax(`gates`), one pair for
    each layer and head, equal parts at step 0. n = max_position_embeddings; a longer input is an
    error. The paper leaves the width of W₁ in several heads open; the head's width is our choice.

    `variant="author"` is mesh-tensorflow's code:

    - factorised: Σ_r R₁[j, r]·R₂[j, r] of the key alone, the same in every row.
    - dense: no b₁ and b₂, one W₂ for all heads; mixed, W₁ x_i is the query of the content.
    - mixed: α₁ = sigmoid(`gates`), α₂ = 1 − α₁, one for each layer.
    """

    dense = True

    def __init__(
        self,
        config: PositionConfig,
        *,
        form: Form = "random",
        mixed: bool = False,
        rank: int = 8,
        variant: Variant = "paper",
        layers: Layers = "each",
    ) -> None:
        super().__init__(config, layers=layers)
        check_variant("Synthesizer", variant)
        if form not in ("random", "factorised", "dense"):
            raise ValueError(
                f'Synthesizer: form must be "random", "factorised" or "dense", got {form!r}'
            )
        if layers == "first":
            raise ValueError(
                'Synthesizer: layers must be "each" or "shared", got "first": the other layers '
                "would have no attention at all"
            )
        if rank < 1:
            raise ValueError(f"Synthesizer: rank must be at least 1, got {rank}")
        self.form, self.rank, self.variant = form, rank, variant
        self.uses_content = mixed
        self.max_length: int = config.max_position_embeddings
        length = self.max_length
        heads = (self.copies, config.num_attention_heads)
        shared = (self.copies, 1) if variant == "author" else heads
        if form == "random":
            self.logits = nn.Parameter(torch.empty(*heads, length, length))
        elif form == "factorised":
            self.query_factors = nn.Parameter(torch.empty(*heads, length, rank))
            self.key_factors = nn.Parameter(torch.empty(*heads, length, rank))
        else:
            inner = config.head_size
            if variant == "paper" or not mixed:
                self.first_weight = nn.Parameter(torch.empty(*heads, config.hidden_size, inner))
            if variant == "paper":
                self.first_bias = nn.Parameter(torch.empty(*heads, 1, inner))
            self.second_weight = nn.Parameter(torch.empty(*shared, inner, length))
            if variant == "paper":
                self.second_bias = nn.Parameter(torch.empty(*heads, 1, length))
        if mixed:
            self.gates = nn.Parameter(torch.empty(*shared, 1 if variant == "author" else 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        deviations = {
            "logits": 1.0,
            "query_factors": self.rank**-0.25,
            "key_factors": self.rank**-0.25,
            "first_weight": self.config.hidden_size**-0.5,
            "second_weight": self.config.head_size**-0.5,
        }
        for name, parameter in self.named_parameters():
            if name in deviations:
                nn.init.normal_(parameter, std=deviations[name])
            else:
                nn.init.zeros_(parameter)

    def read_reference(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take mesh-tensorflow's weights: R, or R1 and R2, or pi/kernel and q; and alpha."""
        if self.variant == "paper":
            raise ValueError('Synthesizer.from_reference: variant must be "author", got "paper"')
        heads, d = self.config.num_attention_heads, self.config.head_size
        # As many positions as this method has of those that theirs has.
        read: dict[str, Callable[[Tensor], tuple[str, Tensor]]] = {
            "R": lambda t: ("logits", t.movedim(1, 0)[:, : self.max_length, : self.max_length]),
            "R1": lambda t: ("query_factors", t.permute(1, 2, 0)[:, : self.max_length]),
            "R2": lambda t: ("key_factors", t.permute(1, 2, 0)[:, : self.max_length]),
            # Their queries are ours over √d, by their first weights.
            "pi/kernel": lambda t: (
                "second_weight",
                t[None, :, : self.max_length] * (d**-0.5 if self.uses_content else 1.0),
            ),
            "q": lambda t: ("first_weight", t.reshape(-1, heads, d).movedim(1, 0)),
            "alpha": lambda t: ("gates", t.reshape(1, 1)),
        }
        names = {"random": ["R"], "factorised": ["R1", "R2"], "dense": ["pi/kernel"]}[self.form]
        names += ["alpha"] if self.uses_content else ["q"] if self.form == "dense" else []
        layers = [
            dict(read[name](layer[name]) for name in names)
            for layer in self.of_layers(state_dict, *names)
        ]
        values = {own: torch.stack([layer[own] for layer in layers]) for own in layers[0]}
        fill(self, values, "give the config the sizes of that model, and its rank")

    def content(self, layer: int, query: Queries) -> Queries:
        """Return the queries times their share of the mixture."""
        return query * self._share(layer, 1).to(query.dtype)

    def dense_logits(
        self, layer: int, query: Queries | None, hidden: Hidden, prepared: Prepared
    ) -> Logits:
        """Return the synthetic logits of these queries."""
        copy, places = self._copy(layer), prepared.places
        rows, columns = (places.query_start, places.queries), (0, places.keys)
        if self.form == "random":
            found = _cut(_cut(self.logits[copy], 1, *rows), 2, *columns).unsqueeze(0)
        elif self.form == "factorised":
            keys = _cut(self.key_factors[copy], 1, *columns)
            if self.variant == "author":
                found = (_cut(self.query_factors[copy], 1, *columns) * keys).sum(-1)
                found = found[None, :, None].expand(-1, -1, places.queries, -1)
            else:
                queries = _cut(self.query_factors[copy], 1, *rows)
                found = (queries @ keys.transpose(-1, -2)).unsqueeze(0)
        else:
            found = self._dense(copy, query, hidden, places.keys)
        return self._share(layer, 0) * found if self.uses_content else found

    def _dense(self, copy: int, query: Queries | None, hidden: Hidden, keys: int) -> Logits:
        """Return the logits from each token alone."""
        weight = _cut(self.second_weight[copy], 2, 0, keys)
        if self.variant == "author":
            inner = hidden.unsqueeze(1) @ self.first_weight[copy] if query is None else query
            return inner.relu() @ weight
        inner = hidden.unsqueeze(1) @ self.first_weight[copy] + self.first_bias[copy]
        return inner.relu() @ weight + _cut(self.second_bias[copy], 2, 0, keys)

    def _copy(self, layer: int) -> int:
        copy = self.copy_of(layer)
        assert copy is not None
        return copy

    def _share(self, layer: int, part: int) -> Float[Tensor, "heads one one_"]:
        gates = self.gates[self._copy(layer)]
        if self.variant == "author":
            gates = torch.cat((gates, torch.zeros_like(gates)), dim=-1)
        return gates.softmax(-1)[:, part, None, None]

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        form = f"form={self.form!r}, mixed={self.uses_content}, variant={self.variant!r}"
        return f"{super().extra_repr()}, {form}"


def _cut(table: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a part of a table along one dimension.

    A copy in an exported graph, which would ask of a view whether it is the whole table.
    """
    if exporting():
        places = torch.arange(start, start + length, device=table.device)
        return table.index_select(dim, places)
    return table.narrow(dim, start, length)
