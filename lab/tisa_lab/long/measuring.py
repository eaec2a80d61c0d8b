"""Models and texts in, a record of what every way of reading finds out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import tisa.hf
from tisa.hf import families
from tisa.hf.calibration import length_limit, pieces
from tisa.hf.saving import load, load_stock
from tisa.packages import device_named
from tisa_lab.executors import InProcess
from tisa_lab.long.encoders import ends_of
from tisa_lab.long.jobs import Answers, Reading, done
from tisa_lab.long.pairs import paired
from tisa_lab.long.readings import FOLD, reference_of, ways_of
from tisa_lab.long.settings import LongConfig
from tisa_lab.long.tasks import Asked, asked_of
from tisa_lab.long.texts import Texts, texts_of
from tisa_lab.pretrain.text import Source, documents
from tisa_lab.record import surroundings
from tisa_lab.sweep import Records, Shown, run_sweep
from tisa_lab.view import Silent

# Tokens of the shortest piece that scores are fitted to.
SHORTEST = 8
CONFIG = LongConfig()


def compared(
    models: Sequence[str],
    out: Path,
    *,
    source: Source,
    config: LongConfig = CONFIG,
    device: str | None = None,
    command: str = "",
    view: Silent | None = None,
) -> dict[str, Any]:
    """Return the record: what is found at each length, in each way, beside the reference.

    Ranks of every query lie in `out`; the same call goes on with those that are there.
    """
    if not models:
        raise ValueError("models must be one or more, got none")
    place = device_named(device)
    asked: dict[str, list[Asked]] = {}
    jobs: list[Reading] = []
    benches: dict[str, _Bench] = {}
    for name in dict.fromkeys(models):
        bench = _Bench(name, source, config, place)
        if bench.label in benches:
            raise ValueError(f"models: two are called {bench.label}; rename a folder")
        benches[bench.label] = bench
        ways = ways_of(bench.original, config.converted, config.chunk, bench.limit)
        for length in sorted(set(config.lengths)):
            some = tuple(bench.asked(length))
            asked.setdefault(bench.label, []).extend(some)
            jobs += [
                Reading(bench.label, bench.weights, way, length, some, config)
                for way in ways if way.fits(length)
            ]  # fmt: skip

    def work(job: Reading) -> Answers:
        bench = benches[job.model]
        return done(job, lambda _, other: bench.model(other), bench.tokenizer)

    records = Records(out, Answers)
    shown = Shown(view or Silent(), "readings", partial(_said, config.chunk), lambda left: None)
    failed = run_sweep(jobs, records, InProcess(work), shown)
    if failed:
        raise ValueError(f"{failed[0][0].label} failed: {failed[0][1]}")
    found = {record.key: record.rows for record in records.all()}
    rows = [row for job in jobs for row in found[job.key]]
    wanted = {one.digest: one.wanted for some in asked.values() for one in some}
    return {
        "kind": "long",
        "models": [
            {"model": b.label, "limit": b.limit, "weights": b.digests} for b in benches.values()
        ],
        "config": asdict(config),
        "asked": [
            {"model": name, **one.named, "asked": one.digest, "queries": len(one.queries),
             "documents": len(one.documents), "wanted": one.wanted, "places": one.places}
            for name, some in asked.items() for one in some
        ],
        "rows": summary(rows, wanted, config.chunk),
        "surroundings": surroundings(command, place),
    }  # fmt: skip


class _Bench:
    """A model, the texts in its tokens, and what was converted of it."""

    def __init__(self, name: str, source: Source, config: LongConfig, place: Any) -> None:
        self.config, self.place = config, place
        self.original, self.tokenizer, checkpoint = load_stock(name)
        if self.tokenizer is None:
            raise ValueError(f"{name}: expected a tokenizer beside the model, got none")
        if reason := families.reason_against(self.original, "replace"):
            raise ValueError(f"{name} cannot be converted: {reason}")
        self.label, self.digests = Path(name).name, checkpoint.digests()
        self.weights = str(self.digests)
        self.original = self.original.to(place).eval()
        self.limit = length_limit(self.original)
        if config.chunk > self.limit:
            raise ValueError(
                f"chunk must be at most {self.limit}, as long as {self.label} takes, got "
                f"{config.chunk}"
            )
        self.texts: Texts = texts_of(
            documents(source), self.tokenizer, count=config.documents, longest=max(config.lengths)
        )
        self._converted: dict[str, PreTrainedModel] = {}

    def asked(self, length: int) -> list[Asked]:
        """Return what is asked at a length."""
        before, after = ends_of(self.tokenizer)
        room = length - len(before) - len(after)
        return asked_of(self.config, self.texts, self.tokenizer, length, room)

    def model(self, name: str) -> PreTrainedModel:
        """Return the original, or what was converted of it, which is made when it is first read."""
        if not name:
            return self.original
        if name not in self._converted:
            self._converted[name] = self._made(name).to(self.place).eval()
        return self._converted[name]

    def _made(self, name: str) -> PreTrainedModel:
        if (Path(name) / "config.json").is_file():
            return load(name)
        options = {"positions": "replace", "num_kernels": 0} if name == FOLD else options_of(name)
        longest = min(self.limit, max(self.config.lengths))
        given = pieces(
            list(self.texts.calibration), self.tokenizer, (SHORTEST, longest - 2),
            count=self.config.calibration, seed=self.config.seed,
        )  # fmt: skip
        return tisa.hf.convert(
            self.original, calibration=given, tokenizer=self.tokenizer,
            **{"fold_by": "inputs"} | options,
        )  # fmt: skip


def options_of(name: str) -> dict[str, Any]:
    """Return what `convert` is told: extend:num_places=20 is positions and an option of it."""
    positions, *others = name.split(":")
    found: dict[str, Any] = {"positions": positions}
    for other in others:
        word, equals, value = other.partition("=")
        if not (word and equals):
            raise ValueError(f"converted must be as in extend:num_places=20, got {name!r}")
        found[word] = _value(value)
    return found


def _value(text: str) -> Any:
    known = {"True": True, "False": False, "None": None}
    if text in known:
        return known[text]
    try:
        return int(text)
    except ValueError:
        return text


def summary(
    rows: Sequence[dict[str, Any]], wanted: Mapping[str, Sequence[int]], chunk: int
) -> list[dict[str, Any]]:
    """Return a row for each model, length, task and way: all haystacks and seeds together.

    `wanted` has the documents that queries mean, by the digest of what is asked.
    """
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cell = (row["model"], row["length"], row["task"], row["kind"], row["row"])
        grouped.setdefault(cell, []).append(row)
    found = []
    for (model, length, task, kind, name), some in grouped.items():
        right = _right(some)
        row = {
            "model": model, "length": length, "task": task, "kind": kind, "row": name,
            "queries": len(right), "accuracy": sum(right.values()) / len(right),
            "mrr": _mean([1 / rank for one in some for rank in one["ranks"]]),
            "vectors": max(one["vectors"] for one in some),
            "seconds": sum(one["seconds"] for one in some),
            "by_haystack": _by_haystack(some),
        }  # fmt: skip
        reference = reference_of(kind, chunk)
        others = grouped.get((model, length, task, kind, reference))
        if others and name != reference:
            theirs = _right(others)
            # Queries of one article hang together, whatever the seed.
            groups = [
                (haystack, "" if task.startswith("article") else seed, wanted[digest][i])
                for haystack, seed, digest, i in right
            ]
            pair = paired([*right.values()], [theirs[key] for key in right], groups)
            row["against"] = {"row": reference, **asdict(pair)}
        found.append(row)
    return found


def _right(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], bool]:
    """Return whether each query finds its document first."""
    return {
        (row["haystack"], row["seed"], row["asked"], i): rank == 1
        for row in rows
        for i, rank in enumerate(row["ranks"])
    }


def _by_haystack(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the accuracy in each, by name; articles lie in none."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        found.setdefault(row["haystack"], []).extend(rank == 1 for rank in row["ranks"])
    return {haystack: _mean(right) for haystack, right in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _said(chunk: int, answers: Answers) -> str:
    told: dict[str, list[bool]] = {}
    for row in answers.rows:
        told.setdefault(row["row"], []).extend(rank == 1 for rank in row["ranks"])
    return ", ".join(f"{name} {100 * _mean(right):.0f} %" for name, right in told.items())
