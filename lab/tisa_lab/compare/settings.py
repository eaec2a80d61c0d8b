"""How large a comparison is: by default some minutes on two cores."""

from dataclasses import dataclass

from tisa_lab.probes.tasks import OFFSET, TASKS


@dataclass(frozen=True)
class CompareConfig:
    """Sizes of every part; the defaults say which method is worth a real run, and no more.

    Args:
        search_steps: Steps of the search for a far dependency that a method can express (criteria).
        tasks: Tasks about places that small encoders are trained on.
        probe_length: Tokens of their training inputs, at most; asked at 4 × that, too.
        probe_steps: Updates of each of them.
        length: Tokens that the language models are trained at; read at 2 and 4 × that, too.
        steps: Updates of each language model.
        batch_tokens: Tokens of an update.
        hidden_size: Width of the language models.
        num_hidden_layers: Their layers.
        num_attention_heads: Their heads.
        learning_rate: Their rate, the same for all methods.
        speed_length: Tokens of the layer whose step is timed.
        speed_rounds: Times that each method takes its turn.
        seed: Of weights, inputs and text.
    """

    search_steps: int = 60
    tasks: tuple[str, ...] = ("find", "reverse")
    probe_length: int = 24
    probe_steps: int = 250
    length: int = 64
    steps: int = 200
    batch_tokens: int = 2048
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    learning_rate: float = 3e-3
    speed_length: int = 512
    speed_rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise ValueError(
                f"tasks must be some of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}"
            )
        if self.probe_length < 2 * (OFFSET + 1):
            raise ValueError(
                f"probe_length must be at least {2 * (OFFSET + 1)}, got {self.probe_length}"
            )
        for name in ("probe_steps", "steps", "speed_length", "speed_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
