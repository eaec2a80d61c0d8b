"""How large a comparison is: some minutes on two cores, or one command on a GPU."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from tisa.positions import METHODS
from tisa_lab.probes.race import RACERS
from tisa_lab.probes.recall import RecallConfig
from tisa_lab.probes.tasks import OFFSET, TASKS

Size = Literal["small", "large"]


@dataclass(frozen=True)
class Sizes:
    """Every size of a comparison, whether asked for or not; `CompareConfig` explains them."""

    others: tuple[str, ...]
    search_steps: int
    tasks: tuple[str, ...]
    probe_length: int
    probe_steps: int
    recall_length: int
    recall_factors: tuple[int, ...]
    recall_steps: int
    length: int
    factors: tuple[int, ...]
    steps: int
    batch_tokens: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    learning_rate: float
    bf16: bool
    speed_length: int
    speed_rounds: int


SIZES: dict[Size, Sizes] = {
    "small": Sizes(
        others=RACERS, search_steps=60, tasks=("find", "reverse"), probe_length=24, probe_steps=250,
        recall_length=32, recall_factors=RecallConfig.factors, recall_steps=RecallConfig.steps,
        length=64, factors=(1, 2, 4), steps=200,
        batch_tokens=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        learning_rate=3e-3, bf16=False, speed_length=512, speed_rounds=5,
    ),
    # Every built-in method can be in a decoder.
    "large": Sizes(
        others=tuple(METHODS), search_steps=400, tasks=tuple(TASKS), probe_length=32,
        probe_steps=2000, recall_length=128, recall_factors=RecallConfig.factors,
        recall_steps=4000, length=512,
        factors=(1, 2, 4, 8, 16), steps=2000, batch_tokens=16384, hidden_size=512,
        num_hidden_layers=4, num_attention_heads=8, learning_rate=1e-3, bf16=True,
        speed_length=2048, speed_rounds=20,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class CompareConfig:
    """What was asked of a comparison; what was not is as in `size`.

    Args:
        size: Small: minutes on two cores, and it says which method is worth a real run; large: on a
            GPU. What follows has its value from there unless given.
        others: What the methods are compared with; large: all of the package.
        search_steps: Steps of the search for a far dependency that a method can express (criteria).
        tasks: Tasks about places that small encoders are trained on.
        probe_length: Tokens of the encoders' training inputs, at most; asked at 4 × the length too.
        probe_steps: Updates of each small encoder.
        recall_length: Tokens that small decoders are trained to remember over, at most.
        recall_factors: The small decoders are asked at the recall length times each factor.
        recall_steps: Updates of each small decoder.
        length: Tokens that the language models are trained at.
        factors: The language models are read at the length times each factor.
        steps: Updates of each language model.
        batch_tokens: Tokens of an update.
        hidden_size: Width of the language models.
        num_hidden_layers: Layers of the language models.
        num_attention_heads: Heads of the language models.
        learning_rate: Rate of the language models, the same for all methods.
        bf16: Whether the language models multiply in bfloat16.
        speed_length: Tokens of the layer whose step is timed.
        speed_rounds: Times that each method takes its turn.
        seed: Of weights, inputs and text.
    """

    size: Size = "small"
    others: tuple[str, ...] | None = None
    search_steps: int | None = None
    tasks: tuple[str, ...] | None = None
    probe_length: int | None = None
    probe_steps: int | None = None
    recall_length: int | None = None
    recall_factors: tuple[int, ...] | None = None
    recall_steps: int | None = None
    length: int | None = None
    factors: tuple[int, ...] | None = None
    steps: int | None = None
    batch_tokens: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    learning_rate: float | None = None
    bf16: bool | None = None
    speed_length: int | None = None
    speed_rounds: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size must be {' or '.join(SIZES)}, got {self.size!r}")
        sizes = self.sizes()
        unknown = [task for task in sizes.tasks if task not in TASKS]
        if unknown or not sizes.tasks:
            raise ValueError(
                f"tasks must be some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
            )
        if sizes.probe_length < 2 * (OFFSET + 1):
            raise ValueError(
                f"probe_length must be at least {2 * (OFFSET + 1)}, got {sizes.probe_length}"
            )
        for name in ("factors", "recall_factors"):
            factors = getattr(sizes, name)
            alone = name == "recall_factors" and len(set(factors)) < 2
            if alone or 1 not in factors or min(factors) < 1:
                raise ValueError(f"{name} must be 1 and whole numbers above it, got {factors}")
        for name in ("probe_steps", "recall_steps", "steps", "speed_length", "speed_rounds"):
            if getattr(sizes, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(sizes, name)}")

    def sizes(self) -> Sizes:
        """Return every size: those that were given, and the others as in `size`."""
        given = {part.name: getattr(self, part.name) for part in fields(Sizes)}
        asked = {name: value for name, value in given.items() if value is not None}
        return replace(SIZES[self.size], **asked)

    def to_dict(self) -> dict[str, Any]:
        """Return every size as plain values, for the record."""
        return {"size": self.size, "seed": self.seed} | asdict(self.sizes())
