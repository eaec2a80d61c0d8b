"""A trained model in, everything that was asked of it out: numbers for a line of a grid's records.

What is asked for and cannot be done of a model (a table of positions that ends) is in the answer
with its reason. So is a part that failed: the run that has just been trained is not lost for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tisa.positions import resolve
from tisa.transformer import LanguageModel
from tisa_lab.evaluation.asked import Asked
from tisa_lab.evaluation.blimp import Blimp, preferred, read
from tisa_lab.evaluation.copying import copied
from tisa_lab.extrapolation.measuring import Documents, measured
from tisa_lab.extrapolation.readings import read_as
from tisa_lab.extrapolation.windows import long_documents
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus, CorpusNames, head
from tisa_lab.pretrain.report import label_of
from tisa_lab.pretrain.text import Vocabulary
from tisa_lab.probes.recall import SYMBOLS, learned

# Enough held-out documents for the longest window; more are not looked at.
HEAD = 4_000_000


@dataclass(frozen=True)
class Evaluation:
    """What is done with every model of a grid, here or in another process."""

    asked: Asked
    names: CorpusNames

    def identity(self) -> dict[str, Any]:
        """Return what the answers depend on, besides the run and its held-out documents."""
        return self.asked.to_dict()

    def check(self, config: Any, valid: Corpus | None, vocabulary: Vocabulary) -> None:
        """Refuse what cannot be asked of these models, before the first is trained."""
        self.asked.check(
            has_valid=valid is not None, objective=config.objective, longest=config.longest
        )
        if self.asked.blimp is not None:
            self._blimp(vocabulary)
        if valid is not None and self.asked.reads:
            self._documents(valid, config)

    def __call__(
        self, model: LanguageModel, config: PretrainConfig, valid: Corpus | None,
        vocabulary: Vocabulary, *, bf16: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the answers of a trained model, part by part."""
        model.eval()
        parts: dict[str, Callable[[], Any]] = {
            "blimp": lambda: preferred(
                model, self._blimp(vocabulary), vocabulary, pairs=self.asked.blimp_pairs, bf16=bf16
            ),
            "windows": lambda: self._windows(model, config, valid, vocabulary, bf16),
            "copying": lambda: self._copied(model, config, valid, vocabulary, bf16),
            "recall": lambda: self._recall(model, config),
        }
        wanted = {*self.asked.evaluate, *(("copying",) if "recall" in self.asked.evaluate else ())}
        found: dict[str, Any] = {}
        for name in (name for name in parts if name in wanted):
            began = time.monotonic()
            try:
                answer = parts[name]()
            except (RuntimeError, torch.OutOfMemoryError) as wrong:
                answer = {
                    "failed": next(iter(str(wrong).strip().splitlines()), type(wrong).__name__)
                }
            found[name] = answer
            found.setdefault("seconds", {})[name] = time.monotonic() - began
        return found

    def _blimp(self, vocabulary: Vocabulary) -> Blimp:
        assert self.asked.blimp is not None
        return _blimp_of(self.asked.blimp, vocabulary, self.names.tokenizer_name())

    def _documents(self, valid: Corpus, config: Any) -> Documents:
        longest = self.asked.lengths(config.longest)[-1]
        return long_documents(
            head(valid, HEAD), longest, self.asked.read_tokens,
            is_causal=config.objective == "causal",
        )  # fmt: skip

    def _windows(
        self, model: LanguageModel, config: PretrainConfig, valid: Corpus | None,
        vocabulary: Vocabulary, bf16: bool,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return the loss by length, as the model was trained and in each other reading."""
        assert valid is not None
        documents, lengths = self._documents(valid, config), self.asked.lengths(config.longest)
        read_models: list[tuple[str | None, LanguageModel]] = [(None, model)]
        for text in self.asked.reading:
            other = read_as(
                model, config.to_dict(), text, resolve(text), config.longest, lengths[-1]
            )
            if other is not None:
                device = next(model.parameters()).device
                read_models.append((label_of(other[1]), other[0].to(device)))
        found = []
        for label, one in read_models:
            rows = measured(
                one, documents, vocabulary, lengths, stride=self.asked.stride or config.longest,
                modes=("sliding",), bf16=bf16,
            )  # fmt: skip
            kept = ("length", "loss", "perplexity", "tokens", "refused")
            told: dict[str, Any] = {} if label is None else {"reading": label}
            found += [told | {k: row[k] for k in kept if k in row} for row in rows]
        return found

    def _copied(
        self, model: LanguageModel, config: PretrainConfig, valid: Corpus | None,
        vocabulary: Vocabulary, bf16: bool,
    ) -> list[dict[str, Any]]:  # fmt: skip
        assert valid is not None
        documents = self._documents(valid, config)
        return copied(model, documents, vocabulary, self.asked.lengths(config.longest), bf16=bf16)

    def _recall(self, model: LanguageModel, config: PretrainConfig) -> list[dict[str, Any]]:
        """Return what a small new decoder with the same method learns to remember.

        With the recipe of `tisa-lab recall`, which is known to teach it; the run's own sizes are
        not, and its rate is one of several.
        """
        recipe = self.asked.recall(seed=config.seed)
        sizes = recipe.model("none", SYMBOLS, is_causal=True).config
        torch.manual_seed(config.seed)
        new = LanguageModel(
            replace(
                sizes, position=model.config.position, window=config.windows(),
                position_options=dict(config.position_options),
            )
        )  # fmt: skip
        return learned(new, recipe, next(model.parameters()).device)


@lru_cache(maxsize=1)
def _blimp_of(path: Path, vocabulary: Vocabulary, tokenizer: str) -> Blimp:
    from tisa_lab.pretrain.text import tokenizer_of

    return read(path, vocabulary, lambda: tokenizer_of(tokenizer))
