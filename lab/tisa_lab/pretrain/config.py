"""One pretraining run: everything that its result depends on, in a frozen config."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tisa.transformer import TransformerConfig
from tisa_lab.pretrain.batches import Phase
from tisa_lab.pretrain.rows import Objective


@dataclass(frozen=True)
class PretrainConfig:
    """Model, data order and recipe; the defaults are an ALBERT-style encoder of 16 M parameters.

    `lengths` are (length of the rows, share of the steps): BERT's schedule is
    ((128, 0.9), (512, 0.1)). `batch_tokens` is the number of tokens in a step, of all processes
    together. Scores of the offset learn at `scores_learning_rate`, by default ten times the other,
    and do not decay. The rate rises over `warmup` of the steps and falls linearly to 0.
    """

    objective: Objective = "mlm"
    position: str = "tisa"
    position_options: Mapping[str, Any] = field(default_factory=dict)
    hidden_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    embedding_size: int | None = 128
    share_layers: bool = False
    norm: str = "pre"
    dropout: float = 0.0
    max_position_embeddings: int | None = None
    lengths: tuple[tuple[int, float], ...] = ((512, 1.0),)
    steps: int = 1000
    batch_tokens: int = 32768
    learning_rate: float = 1e-3
    scores_learning_rate: float | None = None
    warmup: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    mask_share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in ("mlm", "causal"):
            raise ValueError(f'objective must be "mlm" or "causal", got {self.objective!r}')
        for name in ("steps", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        # Nobody else would refuse a negative one: the scores would be trained uphill.
        for name in ("scores_learning_rate", "weight_decay"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share must lie between 0 and 1, got {self.mask_share}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1), got {self.warmup}")
        if not self.lengths or any(
            length < 4 or not 0 < part <= 1 for length, part in self.lengths
        ):
            raise ValueError(
                "lengths must be pairs of a length of at least 4 and a share of the steps above 0, "
                f"got {self.lengths}"
            )
        if not math.isclose(sum(part for _, part in self.lengths), 1.0, abs_tol=1e-6):
            raise ValueError(f"lengths must have shares that add up to 1, got {self.lengths}")
        for length, _ in self.lengths:
            if self.batch_tokens % length:
                raise ValueError(
                    f"batch_tokens must be a multiple of every length, got {self.batch_tokens} and "
                    f"{length}"
                )
        # Says what is wrong with sizes, the method's name or its options, without a tokenizer.
        self.transformer(16)

    @property
    def longest(self) -> int:
        """The longest row."""
        return max(length for length, _ in self.lengths)

    def transformer(self, vocab_size: int) -> TransformerConfig:
        """Return the config of the model."""
        if self.norm not in ("pre", "post"):
            raise ValueError(f'norm must be "pre" or "post", got {self.norm!r}')
        config = TransformerConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            embedding_size=None if self.embedding_size == self.hidden_size else self.embedding_size,
            max_position_embeddings=self.max_position_embeddings or self.longest,
            position=self.position,
            position_options=dict(self.position_options),
            is_causal=self.objective == "causal",
            norm="post" if self.norm == "post" else "pre",
            share_layers=self.share_layers,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )
        if config.max_position_embeddings < self.longest:
            raise ValueError(
                f"max_position_embeddings must be at least the longest length, {self.longest}, "
                f"got {config.max_position_embeddings}"
            )
        return config

    def phases(self) -> list[Phase]:
        """Return the steps of each length."""
        found: list[Phase] = []
        done, first = 0.0, 0
        for length, part in self.lengths:
            done += part
            end = round(done * self.steps)
            found.append(Phase(first, end, length))
            first = end
        return [phase for phase in found if phase.end > phase.first]

    def rate(self, step: int) -> float:
        """Return the share of the learning rate at a step."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return (step + 1) / rising
        return max(0.0, (self.steps - step) / max(1, self.steps - rising))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        return {**asdict(self), "lengths": [list(pair) for pair in self.lengths]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PretrainConfig":
        """Return the config of those values."""
        lengths = tuple((int(length), float(part)) for length, part in values["lengths"])
        return cls(**{**values, "lengths": lengths})
