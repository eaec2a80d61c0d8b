"""Records in, the numbers of Table 3 out: medians, spread, differences, the share given back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tisa_lab.glue.cell import BASELINE, ZEROED, Record, Variant
from tisa_lab.glue.tasks import TASKS, task_named

RESAMPLES = 10_000


@dataclass(frozen=True)
class Entry:
    """One variant on one task: its score by seed; without seeds it is missing."""

    scores: dict[int, float]

    @property
    def median(self) -> float:
        """Return the middle score."""
        return median(self.scores.values())

    @property
    def low(self) -> float:
        """Return the least score."""
        return min(self.scores.values())

    @property
    def high(self) -> float:
        """Return the largest score."""
        return max(self.scores.values())


NO_SEEDS = Entry({})


@dataclass(frozen=True)
class Difference:
    """How far a variant's median lies above another's (or a share), with a 95 % bootstrap interval.

    The interval resamples seeds that all have, together; None where they share fewer than two.
    """

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Gain:
    """The paper's Δ: the largest gain over the baseline, whose S it was, and Δ%."""

    variant: Variant
    difference: Difference
    percent: float


@dataclass(frozen=True)
class Part:
    """Table 3 (a) or (b) of one model: a cell of each variant (row) and task (column)."""

    model: str
    baseline: Variant
    variants: tuple[Variant, ...]
    tasks: tuple[str, ...]
    entries: dict[tuple[Variant, str], Entry]
    # What the same model scores with its positions, for the share given back in (b).
    original: dict[str, Entry]

    @property
    def letter(self) -> str:
        """Return the paper's letter."""
        return self.baseline.part

    @property
    def rows(self) -> tuple[Variant, ...]:
        """Return the table's rows: the baseline, where it is missing too, and all others."""
        return tuple(dict.fromkeys([self.baseline, *self.variants]))

    def entry(self, variant: Variant, task: str) -> Entry:
        """Return one cell; a missing one has no seeds."""
        return self.entries.get((variant, task), NO_SEEDS)

    def difference(
        self, variant: Variant, task: str, base: Variant | None = None
    ) -> Difference | None:
        """Return how far a variant is above the baseline, or above another variant."""
        return difference(self.entry(variant, task), self.entry(base or self.baseline, task))

    def gain(self, task: str) -> Gain | None:
        """Return the largest gain of the paper's rows: random kernels, positions as the baseline's.

        It picks the best S on the dev set, as the paper does, and is biased upwards by that.
        """
        paper = [variant for variant in self.variants if variant.is_paper]
        found = [(d, v) for v in paper if (d := self.difference(v, task)) is not None]
        if not found:
            return None
        best, variant = max(found, key=lambda pair: pair[0].value)
        room = 100 - self.entry(self.baseline, task).median
        return Gain(variant, best, 100 * best.value / room if room > 0 else 0.0)

    def loss(self, task: str, base: Variant | None = None) -> Difference | None:
        """Return what removing positions costs: the original's median less the baseline's."""
        low = self.entry(base or self.baseline, task)
        return difference(self.original.get(task, NO_SEEDS), low)

    def loss_is_clear(self, task: str, base: Variant | None = None) -> bool:
        """Return whether that costs more than either of the two spreads from seed to seed."""
        loss = self.loss(task, base)
        if loss is None:
            return False
        pair = (self.original[task], self.entry(base or self.baseline, task))
        alone = any(len(e.scores) < 2 for e in pair)
        return not alone and loss.value > max(e.high - e.low for e in pair)

    def given_back(
        self, variant: Variant, task: str, base: Variant | None = None
    ) -> Difference | None:
        """Return the share (in per cent) of the loss from `base` that a variant gives back.

        None where a cell is missing, or nothing was lost; without an interval where nothing is lost
        in some of the resamples.
        """
        lost = self.loss(task, base)
        back = self.difference(variant, task, base)
        if lost is None or back is None or lost.value <= 0:
            return None
        low = self.entry(base or self.baseline, task)
        interval = None
        resampled = medians(self.entry(variant, task), low, self.original[task])
        if resampled is not None and (resampled[:, 2] > resampled[:, 1]).all():
            found, bottom, top = resampled.T
            interval = _middle_95(100 * (found - bottom) / (top - bottom))
        return Difference(100 * back.value / lost.value, interval)


def difference(above: Entry, below: Entry) -> Difference | None:
    """Return how far one entry's median is above another's; None where one is missing."""
    if not above.scores or not below.scores:
        return None
    resampled = medians(above, below)
    interval = None if resampled is None else _middle_95(resampled[:, 0] - resampled[:, 1])
    return Difference(above.median - below.median, interval)


def medians(*entries: Entry) -> np.ndarray | None:
    """Return the entries' medians in resamples of the seeds that all have, one row for each.

    None where they share fewer than two seeds.
    """
    seeds = sorted(set.intersection(*(set(entry.scores) for entry in entries)))
    if len(seeds) < 2:
        return None
    scores = np.array([[entry.scores[seed] for entry in entries] for seed in seeds])
    chosen = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    return np.median(scores[chosen], axis=1)


def _middle_95(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def summary(records: Sequence[Record], *, score: str = "last") -> list[Part]:
    """Return parts (a) and (b) for each model; records that cannot stand together are refused.

    `score`: "last" is the last evaluation of a run, "best" the best one on the dev set.
    """
    if score not in ("last", "best"):
        raise ValueError(f"score must be last or best, got {score!r}")
    if not records:
        raise ValueError("records must hold at least one finished run, got none")
    _check(records)
    parts = []
    for model in dict.fromkeys(r.cell.model for r in records):
        own = [r for r in records if r.cell.model == model]
        tasks = tuple(t for t in TASKS if any(r.cell.task == t for r in own))
        scores: dict[tuple[Variant, str], dict[int, float]] = {}
        for r in own:
            place = (r.cell.variant, r.cell.task)
            scores.setdefault(place, {})[r.cell.seed] = _score(r, score)
        entries = {place: Entry(found) for place, found in scores.items()}
        original = {t: entries.get((BASELINE, t), NO_SEEDS) for t in tasks}
        for baseline in (BASELINE, ZEROED):
            variants = {v for v, _ in entries if v.part == baseline.part}
            if variants:
                ordered = tuple(sorted(variants, key=lambda variant: variant.place))
                parts.append(Part(model, baseline, ordered, tasks, entries, original))
    return parts


def _score(record: Record, which: str) -> float:
    name = task_named(record.cell.task).main_metric
    if which == "last":
        return record.metrics[name]
    return max(evaluation[name] for evaluation in record.evaluations)


def _check(records: Sequence[Record]) -> None:
    """Refuse runs of different recipes or rows in one column, and a cell that is there twice."""
    columns: dict[tuple[str, str], dict[str, Any]] = {}
    seen: dict[str, Record] = {}
    for record in records:
        if record.cell.key in seen:
            raise ValueError(
                f"records: {record.cell.label} is there twice (key {record.cell.key}); take one "
                "folder alone, or remove one of the two lines from its records.jsonl"
            )
        seen[record.cell.key] = record
        recipe = {**asdict(record.cell.recipe), "data": record.data}
        first = columns.setdefault((record.cell.model, record.cell.task), recipe)
        differ = [f"{k} {first[k]} and {recipe[k]}" for k in recipe if recipe[k] != first[k]]
        if differ:
            raise ValueError(
                f"records: runs of {task_named(record.cell.task).title} differ in "
                f"{', '.join(differ)}, and cannot stand in one column; "
                "keep each recipe in a folder of its own"
            )
