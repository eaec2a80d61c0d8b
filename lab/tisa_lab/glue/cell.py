"""One cell of Table 3, the grid of them, and what a finished one leaves behind."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

from tisa_lab.glue.tasks import Recipe, task_named
from tisa_lab.glue.variant import Positions, Start, Variant
from tisa_lab.sweep import JobRecord

# Fields that came later: where they have their defaults, a cell keeps the key that it had.
LATER = {"distil": 0, "batches": "padded"}


@dataclass(frozen=True)
class Cell:
    """All that determines a run: the model, the task, its positions, the recipe, the seed."""

    model: str
    task: str
    variant: Variant = field(default_factory=Variant)
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0

    def __post_init__(self) -> None:
        task_named(self.task)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a number from 0 to 2**32 - 1, got {self.seed}")

    @classmethod
    def of(cls, model: str, task: str, *, seed: int = 0, **values: Any) -> "Cell":
        """Return the cell of such values, each by its own name: the reverse of `values`."""
        if "distil" in values:
            values["distil_steps"] = values.pop("distil")
        names = {one.name for one in fields(Variant)}
        variant = Variant(**{n: v for n, v in values.items() if n in names})
        recipe = Recipe(**{n: v for n, v in values.items() if n not in names})
        return cls(model, task, variant, recipe, seed)

    def values(self) -> dict[str, Any]:
        """Return each of its values by its own name, as records have them."""
        variant = asdict(self.variant)
        # The name that it had in the first records.
        variant["distil"] = variant.pop("distil_steps")
        own = {"model": self.model, "task": self.task, "seed": self.seed}
        return {**own, **variant, **asdict(self.recipe)}

    @property
    def key(self) -> str:
        """Return 16 hexadecimal digits that name this cell among all others."""
        values = {n: v for n, v in self.values().items() if n not in LATER or v != LATER[n]}
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Return a short name for people."""
        row = f"({self.variant.part}) {self.variant.label}"
        return f"{task_named(self.task).title} {row}, seed {self.seed}"


def grid(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    kernels: tuple[int, ...] = (0, 1, 3, 5),
    positions: tuple[Positions, ...] = ("keep", "replace"),
    init: tuple[Start, ...] = ("reference",),
    fold: tuple[bool, ...] = (False,),
    frozen: tuple[bool, ...] = (False,),
    distil_steps: tuple[int, ...] = (0,),
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    **recipe: Any,
) -> list[Cell]:
    """Return every cell of the product once, seed by seed; what has no effect is left out.

    Args:
        models: folders, or names on the hub.
        tasks: their names.
        kernels: S, kernels per head.
        positions: keep: with position embeddings (a); replace: without (b).
        init: how kernels start: reference (random), zero, fit.
        fold: what replaces removed positions: no (nothing), yes (their means).
        frozen: fitted kernels: no (trained), yes (not).
        distil_steps: towards the original, after the fit, before training.
        rows: names of the table's rows, in place of the product of all these.
        seeds: of the head, the order of rows, and random kernels.
        **recipe: replaces fields of the tasks' own recipes; `epochs` without `steps` counts.
    """
    if "epochs" in recipe:
        if recipe.get("steps") is not None:
            raise ValueError("steps and epochs: expected one of them, got both")
        recipe = {**recipe, "steps": None}
    variants = [Variant.named(name) for name in rows]
    if not rows:
        for place, size, start, folded, fixed, towards in product(
            positions, kernels, init, fold, frozen, distil_steps
        ):
            effective = size > 0 and start == "fit" and place == "replace"
            if (fixed or towards) and not effective:
                continue
            if start == "fit" and size > 0 and not effective:
                continue
            start = "zero" if size == 0 else start
            folded = folded and place == "replace"
            variants.append(Variant(size, place, start, folded, fixed, towards))
    if not variants:
        raise ValueError(
            'init and positions leave no cells: frozen and distil_steps need init "fit", and that '
            'positions "replace"'
        )
    return list(
        dict.fromkeys(
            Cell(model, task, variant, replace(task_named(task).recipe, **recipe), seed)
            for seed, model, task, variant in product(seeds, models, tasks, variants)
        )
    )


@dataclass(frozen=True)
class Record(JobRecord):
    """One run: its cell, what was measured, and where it was made.

    `metrics` are those of the last evaluation, `evaluations` all of them with their steps.
    `micro_batch_size` is smaller than the cell's batch size where memory was too small for it.
    `data` is the fingerprint of the rows that were trained and evaluated on.
    """

    cell: Cell
    metrics: dict[str, float]
    evaluations: list[dict[str, float]]
    steps: int
    tokens: int
    seconds: dict[str, float]
    micro_batch_size: int
    parameters: dict[str, int]
    data: str
    rows: dict[str, int]
    surroundings: dict[str, Any]
    # Where fitted kernels came from, and how good they are; None where there are none.
    start: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Return the key of its cell."""
        return self.cell.key

    @property
    def label(self) -> str:
        """Return the label of its cell."""
        return self.cell.label

    def to_dict(self) -> dict[str, Any]:
        """Return the record as it is written."""
        return {"key": self.key, **asdict(self), "cell": self.cell.values()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Record":
        """Return the record of what was written, or refuse what is not one."""
        try:
            own = dict(values)
            key = own.pop("key")
            record = cls(**{**own, "cell": Cell.of(**own["cell"])})
        except (KeyError, TypeError, AttributeError) as wrong:
            raise ValueError(
                f"expected a record of `tisa-lab glue`, got {str(values)[:60]} ({wrong})"
            ) from None
        if record.key != key:
            raise ValueError(
                f"the record {key} says that its cell is {record.key}: it was changed by hand, "
                "or written by another version of this package"
            )
        return record

    def numbers(self) -> dict[str, Any]:
        """Return what must be the same in every run of the same cell: all but time and place."""
        left_out = ("seconds", "surroundings", "start")
        return {name: value for name, value in asdict(self).items() if name not in left_out}
