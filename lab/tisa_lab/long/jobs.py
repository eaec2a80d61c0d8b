"""A model, a way to read and a length: one job, whose ranks are kept query by query."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tisa.shapes import Tensor
from tisa_lab.long.encoders import Encoder, mean
from tisa_lab.long.readings import Rows, Way
from tisa_lab.long.settings import LongConfig
from tisa_lab.long.tasks import Asked
from tisa_lab.sweep import JobRecord


@dataclass(frozen=True, eq=False)
class Reading:
    """One job: documents of a length read in one way, with everything that is asked of them."""

    model: str
    weights: str
    way: Way
    length: int
    asked: tuple[Asked, ...]
    config: LongConfig

    @property
    def key(self) -> str:
        """Return its name, of which other weights, documents or a setting make another one."""
        config = self.config
        told = json.dumps([
            self.weights, self.way.name, self.length, [one.digest for one in self.asked],
            [config.chunk, config.query_prefix, config.document_prefix, config.bf16],
            [config.calibration, config.seed] if self.way.model else [],
        ])  # fmt: skip
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        return re.sub(r"[^\w.=+-]+", "-", f"{self.length}-{self.way.name}") + f"-{digest}"

    @property
    def label(self) -> str:
        """Return its model, length and way."""
        return f"{self.model}, {self.length:,} tokens: {self.way.name}"


@dataclass(frozen=True)
class Answers(JobRecord):
    """What a way found: a row for each task and kind of vectors, the rank of every query in it."""

    named: tuple[str, str]
    rows: tuple[dict[str, Any], ...]

    @property
    def key(self) -> str:
        """Return the key of its job."""
        return self.named[0]

    @property
    def label(self) -> str:
        """Return the label of its job."""
        return self.named[1]

    def to_dict(self) -> dict[str, Any]:
        """Return it as it is written."""
        return {"key": self.key, "label": self.label, "rows": list(self.rows)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Answers":
        """Return what was written."""
        try:
            return cls((values["key"], values["label"]), tuple(values["rows"]))
        except (TypeError, KeyError):
            raise ValueError(f"expected ranks of queries, got {str(values)[:60]}") from None


def done(job: Reading, model_of: Callable[[str, str], PreTrainedModel], tokenizer: Any) -> Answers:
    """Read the documents of a job, ask everything, and return the ranks."""
    config = job.config
    model = model_of(job.model, job.way.model)

    def around(other: PreTrainedModel) -> Encoder:
        return Encoder(other, tokenizer, config.document_prefix, config.batch_tokens, config.bf16)

    encoder = around(model)
    asker = Encoder(model, tokenizer, config.query_prefix, config.batch_tokens, config.bf16)
    rows = []
    read: dict[tuple[Any, ...], tuple[Rows, float]] = {}
    for asked in job.asked:
        # Several tasks ask for the same articles.
        if asked.documents not in read:
            began = time.perf_counter()
            found = job.way.read(encoder, asked.documents, around)
            read[asked.documents] = found, time.perf_counter() - began
        found, seconds = read[asked.documents]
        # A query is a sentence: it never comes near the limit of any model here.
        queries = torch.cat(asker.read(asker.words(asked.queries, 128), mean))
        for name, vectors in found.items():
            rows.append({
                "model": job.model, **asked.named, "row": name, "kind": job.way.rows[name],
                "vectors": max(map(len, vectors)), "seconds": round(seconds, 3),
                "asked": asked.digest, "ranks": ranks(queries, vectors, asked.wanted),
            })  # fmt: skip
    return Answers((job.key, job.label), tuple(rows))


def ranks(queries: Tensor, documents: Sequence[Tensor], wanted: Sequence[int]) -> list[int]:
    """Return at which rank each query finds its document, whose best vector counts.

    Of documents that are equally near it is the last: who sees nothing finds nothing.
    """
    scores = torch.stack([(queries @ vectors.T).amax(1) for vectors in documents], 1)
    own = scores.gather(1, torch.tensor(wanted).unsqueeze(1))
    return (scores >= own).sum(1).tolist()
