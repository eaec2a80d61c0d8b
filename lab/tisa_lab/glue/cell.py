"""The rows of Table 3, its cells, the grid of them, and what a finished cell leaves behind."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any, Literal

from tisa_lab.glue.tasks import Recipe, task_named
from tisa_lab.sweep import JobRecord

Start = Literal["zero", "reference", "fit"]
Positions = Literal["keep", "replace"]
# Fields that came later: where they have their defaults, a cell keeps the key that it had.
LATER = {"distil": 0, "batches": "padded"}


@dataclass(frozen=True)
class Variant:
    """A row of the table: all of a cell but the model, the task, the recipe and the seed.

    Args:
        num_kernels: the paper's S; 0 with positions kept is the model as it was published.
        positions: kept, the table's part (a), or replaced, part (b); as in `tisa.hf.convert`.
        init: how kernels start: at random as the paper's, without effect, fitted to the model.
        fold: whether the means of removed position vectors stand in their place.
        frozen: whether fitted kernels are not trained.
        distil_steps: how long the fitted start is first trained towards the original on the task's
            texts (`tisa.hf.distil`).
    """

    num_kernels: int = 5
    positions: Positions = "keep"
    init: Start = "reference"
    fold: bool = False
    frozen: bool = False
    distil_steps: int = 0

    def __post_init__(self) -> None:
        if self.positions not in ("keep", "replace"):
            raise ValueError(f"positions must be keep or replace, got {self.positions!r}")
        if self.init not in ("zero", "reference", "fit"):
            raise ValueError(f"init must be zero, reference or fit, got {self.init!r}")
        for name in ("num_kernels", "distil_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.positions == "keep" and (self.fold or self.init == "fit"):
            raise ValueError(f'init="fit" and fold are for positions="replace", got {self}')
        if self.num_kernels == 0 and self.init != "zero":
            raise ValueError(f'without kernels init is "zero", got {self}')
        if (self.frozen or self.distil_steps) and self.init != "fit":
            raise ValueError(f'frozen and distil_steps are for init="fit", got {self}')

    @classmethod
    def named(cls, label: str) -> "Variant":
        """Return the row that has this name in the first column of the table."""
        found = _LABEL.fullmatch(" ".join(label.split()))
        if found is None:
            raise ValueError(
                "rows must be names as in the first column of the table (baseline; S = 5; zeroed; "
                f"zeroed, S = 5; folded, S = 5, fitted, distilled 30, frozen), got {label!r}"
            )
        size = int(found["size"] or 0)
        start: Start = "reference"
        if found["fit"]:
            start = "fit"
        elif found["zero"] or size == 0:
            start = "zero"
        return cls(
            num_kernels=size,
            positions="replace" if found["gone"] else "keep",
            init=start,
            fold=found["gone"] == "folded",
            frozen=found["frozen"] is not None,
            distil_steps=int(found["distil"] or 0),
        )

    @property
    def part(self) -> str:
        """Return the paper's letter for the half of the table in which the row stands."""
        return "a" if self.positions == "keep" else "b"

    @property
    def label(self) -> str:
        """Return what stands in the first column of the table."""
        if self == BASELINE:
            return "baseline"
        words = [] if self.positions == "keep" else ["folded" if self.fold else "zeroed"]
        if self.num_kernels > 0:
            words.append(f"S = {self.num_kernels}")
            words += {"reference": [], "zero": ["from zero"], "fit": ["fitted"]}[self.init]
        words += [f"distilled {self.distil_steps}"] if self.distil_steps else []
        words += ["frozen"] if self.frozen else []
        return ", ".join(words)

    @property
    def is_paper(self) -> bool:
        """Return whether it is a row of the paper that has kernels: random ones, nothing folded."""
        return self.num_kernels > 0 and self.init == "reference" and not self.fold

    @property
    def place(self) -> tuple[object, ...]:
        """Return what rows of a table are sorted by."""
        return (
            self.num_kernels > 0, self.fold, self.init == "fit", self.init, self.frozen,
            self.distil_steps, self.num_kernels,
        )  # fmt: skip

    def unfrozen(self) -> "Variant":
        """Return the row with the same start whose kernels are trained."""
        return replace(self, frozen=False)


# The model as it was published, without its positions, and with their means in their place.
BASELINE = Variant(0, init="zero")
ZEROED = Variant(0, "replace", "zero")
FOLDED = Variant(0, "replace", "zero", fold=True)

_LABEL = re.compile(
    r"baseline|(?=.)(?P<gone>zeroed|folded)?"
    r"(?:(?:^|, )S = (?P<size>[1-9]\d*)(?P<zero>, from zero)?(?P<fit>, fitted)?"
    r"(?:, distilled (?P<distil>[1-9]\d*))?(?P<frozen>, frozen)?)?"
)


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
