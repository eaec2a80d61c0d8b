"""Records of a grid in, a curve for each method out: its loss against the learning rate.

A method is judged at its best rate. Rates are compared by perplexity on the seeds that all of them
have: a rate with a lucky seed more would win by that.
"""

import json
import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tisa.transformer.before import BEFORE_3
from tisa.transformer.config import SOURCE
from tisa_lab.pretrain.asking import EVALUATED
from tisa_lab.pretrain.report import label_of

# Before this day some defaults were others, and records did not name them.
DEFAULTS_CHANGED = "2026-11-19"
OWN = ("position", "position_options", "window", SOURCE, "seed", "learning_rate",
       "scores_learning_rate")  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """The runs of one method: for each rate the records of its seeds."""

    label: str
    runs: dict[float, list[dict[str, Any]]]

    @property
    def rates(self) -> list[float]:
        """The rates, the lowest first."""
        return sorted(self.runs)

    def losses(self, rate: float) -> list[float]:
        """Return the last validation loss of each seed; infinite for one that diverged."""
        return [loss_of(record) for record in self.runs[rate]]

    def perplexity(self, rate: float) -> float:
        """Return the perplexity of the mean loss over all seeds of a rate."""
        return _perplexity(statistics.fmean(self.losses(rate)))

    @property
    def best(self) -> float:
        """The rate with the lowest loss."""
        seeds = [{record["config"]["seed"] for record in some} for some in self.runs.values()]
        common = set.intersection(*seeds)

        def mean(rate: float) -> float:
            some = [r for r in self.runs[rate] if not common or r["config"]["seed"] in common]
            return statistics.fmean(map(loss_of, some))

        return min(self.rates, key=mean)

    @property
    def spread(self) -> float | None:
        """The difference between the worst and the best seed at the best rate, None for one."""
        losses = self.losses(self.best)
        return max(losses) - min(losses) if len(losses) > 1 else None

    def within(self, share: float) -> tuple[float, float, bool]:
        """Return between which rates the perplexity is at most 1 + share times the best.

        Between two rates the loss is taken as a straight line over the rate's logarithm. The last
        is whether the range ends where nothing else was tried.
        """
        limit = math.log(self.perplexity(self.best)) + math.log1p(share)
        points = [(math.log(rate), math.log(self.perplexity(rate))) for rate in self.rates]
        at = self.rates.index(self.best)
        low, lowest = _walk(points[at::-1], limit)
        high, highest = _walk(points[at:], limit)
        return math.exp(low), math.exp(high), lowest or highest

    def answers(self, part: str) -> list[Any]:
        """Return what each seed at the best rate answered of a part of its evaluation."""
        found = [record.get(EVALUATED, {}).get(part) for record in self.runs[self.best]]
        return [one for one in found if one is not None and "failed" not in one]


def loss_of(record: dict[str, Any]) -> float:
    """Return the last validation loss of a run; infinite where it diverged."""
    return math.inf if "diverged" in record else float(record["evaluations"][-1]["loss"])


def curves_of(records: list[dict[str, Any]]) -> list[Curve]:
    """Return the methods' curves, the best first; of a run that is there twice, the later one."""
    recipes = {json.dumps(_recipe(record), sort_keys=True) for record in records}
    if len(recipes) != 1:
        raise ValueError(
            "records: expected runs of one recipe, with other methods, rates and seeds alone, got "
            f"{len(recipes)} recipes: {_difference(recipes)}"
        )
    sums = {record["corpus_sha256"] for record in records if record.get("corpus_sha256")}
    if len(sums) > 1:
        raise ValueError(f"records: expected runs on one corpus, got {', '.join(sorted(sums))}")
    found: dict[str, dict[float, dict[int, dict[str, Any]]]] = {}
    for record in records:
        rates = found.setdefault(label(record), {})
        config = record["config"]
        rates.setdefault(config["learning_rate"], {})[config["seed"]] = record
    curves = [
        Curve(name, {rate: [seeds[n] for n in sorted(seeds)] for rate, seeds in rates.items()})
        for name, rates in found.items()
    ]
    return sorted(curves, key=lambda curve: curve.perplexity(curve.best))


def label(record: dict[str, Any]) -> str:
    """Return the method, with the options that a run of before took for granted."""
    config = record["config"]
    meant: dict[str, Any] = {}
    if record["surroundings"]["date"] < DEFAULTS_CHANGED:
        meant = dict(BEFORE_3.get(config["position"], {}))
    return label_of(config | {"position_options": meant | config["position_options"]})


def gate(curves: list[Curve], *, times: float = 5.0) -> str:
    """Return in words whether none and absolute are apart at their best rates."""
    named = {curve.label: curve for curve in curves}
    if not {"none", "absolute"} <= set(named):
        return "The gate needs runs of `none` and of `absolute`: it cannot be said."
    none, absolute = named["none"], named["absolute"]
    (a, b), spreads = (
        [statistics.fmean(one.losses(one.best)) for one in (none, absolute)],
        [one.spread for one in (none, absolute)],
    )
    told = (
        f"At their best rates `none` has a loss of {a:.4f} and `absolute` one of {b:.4f}: "
        f"`absolute` is {'better' if b < a else 'worse'} by {abs(a - b):.4f}."
    )
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return f"{told} With one seed of either, the gate cannot be decided."
    ratio = abs(a - b) / max(known) if max(known) else math.inf
    passed = "is passed" if ratio > times and b < a else "is not passed"
    return f"{told} That is {ratio:.1f} times the spread over seeds: the gate ({times:g}) {passed}."


def _walk(points: list[tuple[float, float]], limit: float) -> tuple[float, bool]:
    """Return how far a curve stays below a limit, and whether it does to its end."""
    for (x, y), (other, higher) in pairwise(points):
        if higher > limit:
            share = 0.0 if math.isinf(higher) else (limit - y) / (higher - y)
            return x + share * (other - x), False
    return points[-1][0], True


def _perplexity(loss: float) -> float:
    return math.exp(loss) if math.isfinite(loss) else math.inf


def _recipe(record: dict[str, Any]) -> dict[str, Any]:
    """Return what all runs have in common.

    The corpus's fingerprint has the number of its format in it, which says nothing of the text.
    """
    recipe = {name: value for name, value in record["config"].items() if name not in OWN}
    tokens = (record.get("validation") or [None, None])[1]
    return recipe | {
        "tokenizer": record.get("tokenizer"), "precision": record.get("precision"),
        "validation tokens": tokens,
    }  # fmt: skip


def _difference(recipes: set[str]) -> str:
    found = [json.loads(recipe) for recipe in sorted(recipes)]
    names = dict.fromkeys(name for recipe in found for name in recipe)
    return "; ".join(
        f"{name} {', '.join(sorted({json.dumps(one.get(name)) for one in found}))}"
        for name in names
        if len({json.dumps(one.get(name)) for one in found}) > 1
    )
