"""What is asked of a trained model before its run ends; who asks is none of this package."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from tisa.transformer import LanguageModel
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus
from tisa_lab.pretrain.text import Vocabulary

# In the identity of a run whose model is asked something, and the answers in its record.
EVALUATE, EVALUATED = "evaluate", "evaluated"


@runtime_checkable
class Evaluate(Protocol):
    """Asks a trained model, and carried by pickle to where that is."""

    def identity(self) -> dict[str, Any]:
        """Return what the answers depend on besides the run."""
        ...

    def __call__(
        self, model: LanguageModel, config: PretrainConfig, valid: Corpus | None,
        vocabulary: Vocabulary, *, bf16: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the answers, part by part; one that failed has the reason as `failed`."""
        ...


def check_processes(evaluate: Evaluate | None, processes: int) -> None:
    """Refuse several processes, of which none may have the whole model."""
    if evaluate is not None and processes > 1:
        raise ValueError(f"evaluate: expected one process, got {processes}")


def told(answers: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """Return what a run's record has of the answers, and say which part failed."""
    for name, answer in answers.items():
        if "failed" in answer:
            say(f"{name}: {answer['failed']}", wrong=True)
    return {EVALUATED: answers}
