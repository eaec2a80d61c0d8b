"""Everything that a run's result depends on, and how the run is carried out: frozen, checked."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from tisa.positions import Asked, Told, build_position, canonical, described, recalled, resolve
from tisa.transformer import TransformerConfig
from tisa.transformer.config import SOURCE

Objective = Literal["mlm", "causal"]
# In the folder of a grid: a line for each finished run.
RECORDS = "records.jsonl"


class Length(NamedTuple):
    """Tokens of a row, and the share of the steps that has such rows."""

    tokens: int
    share: float = 1.0


class Phase(NamedTuple):
    """Steps from `first` to before `end` on rows of one length."""

    first: int
    end: int
    length: int


@dataclass(frozen=True)
class Recipe:
    """What runs that are compared have in common; an ALBERT-style encoder of 16 M parameters.

    Args:
        objective: An encoder that fills masks (mlm), or a decoder (causal).
        hidden_size: Width.
        num_hidden_layers: Layers, or passes through the shared one.
        num_attention_heads: Attention heads.
        intermediate_size: Width of the feed-forward part; by default four times hidden_size.
        embedding_size: Width of the embeddings (ALBERT).
        share_layers: One layer's weights for all (ALBERT).
        norm: Layer norm before (pre) or after (post) each part.
        dropout: Of hidden states and attention.
        max_position_embeddings: Positions of methods that have a table; by default the longest row.
        lengths: Tokens in a row; BERT's schedule, with shares of the steps, is 128:0.9,512:0.1.
        steps: Updates.
        batch_tokens: Tokens of a step, of all processes together.
        warmup: Share of the steps over which the rate rises; then it falls to 0, linearly.
        weight_decay: Not of biases, norms and scores.
        beta2: Of AdamW.
        clip: Largest norm of the gradients.
        mask_share: Share of the tokens to predict.
        window: How far a query sees to both sides; by default without limit. Windows with
            + between them are for the layers in turn, as in none+64+64.
    """

    objective: Objective = "mlm"
    hidden_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    embedding_size: int | None = 128
    share_layers: bool = False
    norm: Literal["pre", "post"] = "pre"
    dropout: float = 0.0
    max_position_embeddings: int | None = None
    lengths: tuple[Length, ...] = (Length(512),)
    steps: int = 1000
    batch_tokens: int = 32768
    warmup: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    mask_share: float = 0.15
    window: str | None = None

    def __post_init__(self) -> None:
        if self.objective not in ("mlm", "causal"):
            raise ValueError(f'objective must be "mlm" or "causal", got {self.objective!r}')
        if self.norm not in ("pre", "post"):
            raise ValueError(f'norm must be "pre" or "post", got {self.norm!r}')
        _at_least_1(self, "steps", "batch_tokens")
        _above_0(self, "clip")
        _not_negative(self, "weight_decay")
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share must lie between 0 and 1, got {self.mask_share}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1), got {self.warmup}")
        self.windows()
        self._check_lengths()

    def _check_lengths(self) -> None:
        pairs = [tuple(pair) for pair in self.lengths]
        if not pairs or any(length < 4 or not 0 < share <= 1 for length, share in pairs):
            raise ValueError(
                "lengths must be pairs of a length of at least 4 and a share of the steps above 0, "
                f"got {pairs}"
            )
        if not math.isclose(sum(share for _, share in pairs), 1.0, abs_tol=1e-6):
            raise ValueError(f"lengths must have shares that add up to 1, got {pairs}")
        for length, _ in pairs:
            if self.batch_tokens % length:
                raise ValueError(
                    f"batch_tokens must be a multiple of every length, got {self.batch_tokens} and "
                    f"{length}"
                )

    def windows(self) -> list[int | None] | None:
        """Return the windows of the layers in turn, None where all see everything."""
        if self.window is None:
            return None
        words = self.window.split("+")
        if not all(word == "none" or word.isdecimal() for word in words):
            raise ValueError(
                "window must be whole numbers, or none, with + between the windows of layers, "
                f"got {self.window!r}"
            )
        return [None if word == "none" else int(word) for word in words]

    @property
    def longest(self) -> int:
        """The longest row."""
        return max(length for length, _ in self.lengths)

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


@dataclass(frozen=True)
class PretrainConfig(Recipe):
    """One run: a recipe, a position method, a rate and a seed.

    Args:
        position: The position method: a name, a class, or my_file.py:Class.
        position_options: Its arguments, as in {"layers": "shared"}.
        learning_rate: The peak.
        scores_learning_rate: Of scores of the offset, which do not decay; by default ten times the
            other.
        seed: Of weights, order and masks.
    """

    position: Asked = "tisa"
    position_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    scores_learning_rate: float | None = None
    seed: int = 0
    # The method's name, and where its class came from, when the run was set up.
    _named: ClassVar[tuple[str, Told | None]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _above_0(self, "learning_rate")
        # Nobody else would refuse a negative one: the scores would be trained uphill.
        _not_negative(self, "scores_learning_rate")
        chosen = resolve(self.position)
        # A class in a file stays its file: other processes run it again.
        object.__setattr__(self, "position", chosen.given)
        object.__setattr__(self, "_named", (chosen.name, described(chosen)))
        options = {**self.position_options, **chosen.options}
        object.__setattr__(self, "position_options", options)
        # Says what is wrong with sizes, the method's name or its options, without a tokenizer,
        # memory or random numbers.
        with torch.device("meta"):
            build_position(self.position, self.transformer(16).position_config())

    def transformer(self, vocab_size: int) -> TransformerConfig:
        """Return the config of the model."""
        chosen = resolve(self.position)
        if described(chosen) != self._named[1]:
            raise ValueError(
                f"position: the file of {chosen.name} has changed since this run was set up; start "
                "it again"
            )
        config = TransformerConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
            embedding_size=None if self.embedding_size == self.hidden_size else self.embedding_size,
            max_position_embeddings=self.max_position_embeddings or self.longest,
            position=chosen.position,
            position_options=dict(self.position_options),
            is_causal=self.objective == "causal",
            norm=self.norm,
            share_layers=self.share_layers,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            window=self.windows(),
        )
        if config.max_position_embeddings < self.longest:
            raise ValueError(
                f"max_position_embeddings must be at least the longest length, {self.longest}, "
                f"got {config.max_position_embeddings}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a JSON file; of a class of somebody's, where it came from."""
        name, source = self._named
        more = {} if source is None else {SOURCE: source}
        lengths = [list(pair) for pair in self.lengths]
        values = {**asdict(self), "lengths": lengths, "position": name, **more}
        if self.window is None:
            # As in the records of before there were windows: runs of then go on.
            del values["window"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PretrainConfig":
        """Return the config of those values; no file is run that they name."""
        values = dict(values)
        values["lengths"] = tuple(Length(int(n), float(part)) for n, part in values["lengths"])
        values["position"] = recalled(values["position"], values.pop(SOURCE, None))
        return cls(**values)


@dataclass(frozen=True)
class RunSettings:
    """How a run is carried out: what is set for a machine, and what changes no result.

    Args:
        micro_tokens: Tokens that a process takes at a time; the gradients of a step are added up.
        device: Where to compute: cpu or cuda; by default a GPU where there is one.
        bf16: Products in bfloat16 (autocast).
        compile: Compile the model (torch.compile).
        compile_mode: Of torch.compile; reduce-overhead: CUDA graphs.
        report_to: Trackers of accelerate: tensorboard, wandb, …
        log_every: Steps between two lines about loss and speed.
        evaluate_every: Steps between two losses on held-out documents.
        checkpoint_every: Steps between two checkpoints.
        valid_tokens: How many of the held-out documents' tokens are read.
        max_seconds: Write a checkpoint then, and stop; counted from the start.
        peak_flops: Of a device that is not known, for the share of it that is used.
    """

    micro_tokens: int | None = None
    device: str | None = None
    bf16: bool = False
    compile: bool = False
    compile_mode: str = "default"
    report_to: tuple[str, ...] = ()
    log_every: int = 10
    evaluate_every: int = 500
    checkpoint_every: int = 500
    valid_tokens: int = 500_000
    max_seconds: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        _at_least_1(self, "log_every", "evaluate_every", "checkpoint_every", "valid_tokens")
        if self.micro_tokens is not None:
            _at_least_1(self, "micro_tokens")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be more than 0, got {self.max_seconds}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")


def _at_least_1(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def _above_0(config: Any, name: str) -> None:
    if not getattr(config, name) > 0:
        raise ValueError(f"{name} must be above 0, got {getattr(config, name)}")


def _not_negative(config: Any, name: str) -> None:
    if not 0 <= (getattr(config, name) or 0.0) < math.inf:
        raise ValueError(f"{name} must be at least 0, got {getattr(config, name)}")


@dataclass(frozen=True)
class Grid(Recipe):
    """One recipe with several position methods, rates and seeds.

    Args:
        position: The position method, by name or as my_file.py:Class; several with commas. Options
            follow after colons, as in tisa:layers=shared. Methods with + between them are for the
            layers in turn, as in rotary:base=160000+none.
        position_options: Options of all methods, as in '{"layers": "shared"}'.
        learning_rate: The peak; several with commas.
        scores_learning_rate: Of scores of the offset; by default ten times learning_rate.
        seed: Of weights, order and masks.
        seeds: How many seeds, from the first one on.
    """

    position: tuple[str, ...] = ("tisa",)
    position_options: dict[str, Any] = field(default_factory=dict)
    learning_rate: tuple[float, ...] = (1e-3,)
    scores_learning_rate: float | None = None
    seed: int = 0
    seeds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")

    def configs(self) -> list[PretrainConfig]:
        """Return every run, all of one seed before the next: each seed is a whole table."""
        recipe = {part.name: getattr(self, part.name) for part in fields(Recipe)}
        rates = dict.fromkeys(self.learning_rate)
        names = dict.fromkeys(map(canonical, self.position))
        seeds = range(self.seed, self.seed + self.seeds)
        made = []
        for seed, rate, name in product(seeds, rates, names):
            made.append(
                PretrainConfig(
                    **recipe,
                    position=name,
                    position_options=self.position_options,
                    learning_rate=rate,
                    scores_learning_rate=self.scores_learning_rate,
                    seed=seed,
                )
            )
        return made
