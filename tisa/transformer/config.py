"""What a transformer is made of: a frozen config that goes into a JSON file and comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from tisa.positions import Asked, PositionConfig, described, recalled, resolve
from tisa.scoring.base import check_flags

# Of plain values: where the class of the position method came from.
SOURCE = "position_source"


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a transformer; the defaults are BERT base with TISA.

    `position` is a name from `tisa.positions.METHODS`, a class of your own, or "my_file.py:Class"
    (`tisa.positions.naming` has all forms). `position_options` has the keyword arguments of the
    method; options in the name are moved there. Several methods, as a list or as
    "rotary:base=160000+rotary+rotary", are for the layers in turn, and begin again from the first.
    Their options stand in their names, and the config keeps one name with +. `window` is how far a
    query sees to both sides (ModernBERT's 128 is 64 here), None is without limit. A list of windows
    is for the layers in turn: with [None, 64, 64] every third layer sees everything.
    `norm` is "pre" or "post". `share_layers` passes through one layer's weights
    `num_hidden_layers` times (ALBERT); positions still know which pass it is. `embedding_size`
    factorises the input embeddings (ALBERT). `is_causal` makes it a decoder. `sinks` gives the
    softmax of every head a learned logit that no token has (gpt-oss).
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    embedding_size: int | None = None
    max_position_embeddings: int = 512
    position: Asked = "tisa"
    position_options: Mapping[str, Any] = field(default_factory=dict)
    is_causal: bool = False
    norm: Literal["pre", "post"] = "pre"
    share_layers: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    window: int | Sequence[int | None] | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        chosen = resolve(self.position)
        object.__setattr__(self, "position", chosen.position)
        # A copy: the caller may change its own for the next model, and this one is saved later.
        options = {**self.position_options, **chosen.options}
        object.__setattr__(self, "position_options", options)
        check_flags(
            "TransformerConfig",
            is_causal=self.is_causal, share_layers=self.share_layers, sinks=self.sinks,
        )  # fmt: skip
        if self.norm not in ("pre", "post"):
            raise ValueError(f'norm must be "pre" or "post", got {self.norm!r}')
        for name in ("vocab_size", "feed_forward_size", "embedding_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        object.__setattr__(self, "window", checked_window(self.window, self.num_hidden_layers))
        self.position_config()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far a query of each layer sees; empty where all see everything."""
        return windows_of(self.window, self.num_hidden_layers)

    @property
    def feed_forward_size(self) -> int:
        """The width inside the feed-forward layers, by default four times `hidden_size`."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def embedding_width(self) -> int:
        """The width of the input embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    def position_config(self) -> PositionConfig:
        """Return what the position method has to know."""
        return PositionConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_hidden_layers=self.num_hidden_layers,
            max_position_embeddings=self.max_position_embeddings,
            is_causal=self.is_causal,
            embedding_size=self.embedding_size,
            options=dict(self.position_options),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, for a JSON file.

        Of a method that is none of this package they say where its class came from.
        """
        chosen = resolve(self.position)
        source = described(chosen)
        values = {**asdict(self), "position": chosen.name}
        if self.window is None:
            # As models that know of no windows have it.
            del values["window"]
        return values if source is None else {**values, SOURCE: source}

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, position: Asked | None = None
    ) -> "TransformerConfig":
        """Return the config of those values; an unknown name is an error.

        `position` is the class that the values name, where it is none of this package. Without it
        the class is looked for among those that are imported or registered; its file is not run.
        """
        values = dict(values)
        named = values.get("position", cls.position)
        values["position"] = recalled(named, values.pop(SOURCE, None), position)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"TransformerConfig: unknown {', '.join(unknown)}; written by a newer version? "
                f"Known are {', '.join(sorted(known))}"
            )
        return cls(**values)


def windows_of(window: int | Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    """Return the window of every layer; empty where all see everything."""
    if window is None:
        return ()
    each = (window,) if isinstance(window, int) else tuple(window)
    return tuple(each[layer % len(each)] for layer in range(layers))


def checked_window(
    window: int | Sequence[int | None] | None, layers: int
) -> int | tuple[int | None, ...] | None:
    """Return the window as it is kept, or refuse it."""
    each = (window,) if window is None or isinstance(window, int) else tuple(window)
    if not 1 <= len(each) <= layers:
        raise ValueError(
            f"window must be a number, or a list of one to {layers} (num_hidden_layers), got "
            f"{window!r}"
        )
    for side in each:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise ValueError(
                f"window must be whole numbers from 0 on, or None without limit, got {window!r}"
            )
    if set(each) == {None}:
        return None
    return window if isinstance(window, int) else each
