"""One cell of Table 3, and the grid of them."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal

from tisa_lab.glue.tasks import task_named

Start = Literal["zero", "reference", "fit"]
Positions = Literal["keep", "replace"]
Batches = Literal["padded", "packed"]

# Fields that came later: where they have their defaults, a cell keeps the key that it had.
LATER = ("distil", "batches")


@dataclass(frozen=True)
class Cell:
    """All that determines a run: the model, the task, its positions, the recipe, the seed.

    `positions`, `init` and `fold` are those of `tisa.hf.convert`. `num_kernels` is the paper's S; 0
    with "keep" is the model as it was published. `frozen`: kernels are not trained. `distil`: the
    fitted start is first trained for so many steps towards the original on the task's texts
    (`tisa.hf.distil`). A recipe has `steps` or, where they are None, `epochs`.
    `warmup` is a share of the steps. `batches`: how rows for training are put together.
    """

    model: str
    task: str
    num_kernels: int = 5
    positions: Positions = "keep"
    init: Start = "reference"
    fold: bool = False
    frozen: bool = False
    seed: int = 0
    learning_rate: float = 1e-5
    scores_learning_rate: float | None = None
    batch_size: int = 32
    dropout: float | None = 0.0
    steps: int | None = None
    epochs: float = 3.0
    warmup: float = 0.06
    weight_decay: float = 0.01
    max_length: int = 512
    train_rows: int | None = None
    evaluations: int = 4
    calibration_rows: int = 192
    distil: int = 0
    batches: Batches = "padded"

    def __post_init__(self) -> None:
        task_named(self.task)
        for name, allowed in (
            ("positions", ("keep", "replace")),
            ("init", ("zero", "reference", "fit")),
            ("batches", ("padded", "packed")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in ("batch_size", "max_length", "evaluations", "calibration_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("steps", "train_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, or None, got {value}")
        if self.distil < 0:
            raise ValueError(f"distil: expected 0 steps or more, got {self.distil}")
        if self.num_kernels < 0:
            raise ValueError(f"num_kernels: expected 0 or more, got {self.num_kernels}")
        for name in ("learning_rate", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        # Nobody else would refuse a negative one: the kernels would be trained uphill.
        for name in ("scores_learning_rate", "weight_decay"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0 <= (self.dropout or 0.0) < 1:
            raise ValueError(f"dropout: expected a share from 0 to below 1, got {self.dropout}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected a number from 0 to 2**32 - 1, got {self.seed}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup: expected a share of the steps below 1, got {self.warmup}")
        if self != self._plain():
            raise ValueError(
                'init="fit" and fold are for positions="replace", frozen and distil for '
                f'init="fit", and without kernels init is "zero"; got {self.variant}, '
                f"frozen={self.frozen}, distil={self.distil}"
            )

    def _plain(self) -> "Cell":
        """Return the same cell without what has no effect in it."""
        changes: dict[str, Any] = {}
        if self.positions == "keep" and self.fold:
            changes["fold"] = False
        if self.positions == "keep" and self.init == "fit":
            changes["init"] = "reference"
        if self.num_kernels == 0 and self.init != "zero":
            changes["init"] = "zero"
        if (self.frozen or self.distil) and (self.init != "fit" or self.num_kernels == 0):
            changes |= {"frozen": False, "distil": 0}
        return replace(self, **changes) if changes else self

    @property
    def key(self) -> str:
        """Return 16 hexadecimal digits that name this cell among all others."""
        values = asdict(self)
        for field in fields(self):
            if field.name in LATER and values[field.name] == field.default:
                del values[field.name]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def variant(self) -> str:
        """Return what stands in the first column of the table: all but the task and the seed."""
        if self.positions == "keep":
            if self.num_kernels == 0:
                return "baseline"
            return f"S = {self.num_kernels}" + (", from zero" if self.init == "zero" else "")
        return self.start + (", frozen" if self.frozen else "")

    @property
    def start(self) -> str:
        """Return what stands in the positions' place before training, in (b)."""
        folded = "folded" if self.fold else "zeroed"
        if self.num_kernels == 0:
            return folded
        start = {"reference": "", "zero": ", from zero", "fit": ", fitted"}[self.init]
        distilled = f", distilled {self.distil}" if self.distil else ""
        return f"{folded}, S = {self.num_kernels}{start}{distilled}"

    @property
    def label(self) -> str:
        """Return a short name for people."""
        part = "a" if self.positions == "keep" else "b"
        return f"{task_named(self.task).title} ({part}) {self.variant}, seed {self.seed}"


def recipe_of(task: str) -> dict[str, Any]:
    """Return the fields of a cell that the task's recipe says."""
    recipe = task_named(task).recipe
    return {
        "learning_rate": recipe.learning_rate,
        "batch_size": recipe.batch_size,
        "dropout": recipe.dropout,
        "steps": recipe.steps,
        "warmup": recipe.warmup_steps / recipe.steps,
    }


def row_named(name: str) -> dict[str, Any]:
    """Return the fields of a cell of that row of the table: the reverse of `Cell.variant`."""
    match = _ROW.fullmatch(" ".join(name.split()))
    if match is None:
        raise ValueError(
            "rows: expected names as in the first column of the table (baseline; S = 5; zeroed; "
            f"zeroed, S = 5; folded, S = 5, fitted, distilled 30, frozen), got {name!r}"
        )
    gone, size = match["gone"], int(match["size"] or 0)
    start: Start = "fit" if match["fit"] else "zero" if match["zero"] or not size else "reference"
    return {
        "num_kernels": size,
        "positions": "replace" if gone else "keep",
        "init": start,
        "fold": gone == "folded",
        "frozen": match["frozen"] is not None,
        "distil": int(match["distil"] or 0),
    }


_ROW = re.compile(
    r"baseline|(?=.)(?P<gone>zeroed|folded)?"
    r"(?:(?:^|, )S = (?P<size>[1-9]\d*)(?P<zero>, from zero)?(?P<fit>, fitted)?"
    r"(?:, distilled (?P<distil>[1-9]\d*))?(?P<frozen>, frozen)?)?"
)


def grid(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    kernels: Sequence[int] = (0, 1, 3, 5),
    positions: Sequence[Positions] = ("keep", "replace"),
    starts: Sequence[Start] = ("reference",),
    folds: Sequence[bool] = (False,),
    frozen: Sequence[bool] = (False,),
    distil: Sequence[int] = (0,),
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    **recipe: Any,
) -> list[Cell]:
    """Return every cell of the product once, seed by seed; what has no effect is left out.

    `rows` are names of the table's rows, in place of the product from `kernels` to `distil`.
    `recipe` replaces fields of the tasks' own recipes. `epochs` given without `steps` counts.
    """
    if "epochs" in recipe:
        recipe = {"steps": None, **recipe}
    variants = [row_named(name) for name in rows]
    if not rows:
        for place, size, start, fold, fixed, towards in product(
            positions, kernels, starts, folds, frozen, distil
        ):
            effective = size > 0 and start == "fit" and place == "replace"
            if start == "fit" and place == "keep" and size > 0:
                continue
            if (fixed or towards) and not effective:
                continue
            variants.append(
                {
                    "num_kernels": size,
                    "positions": place,
                    "init": "zero" if size == 0 else start,
                    "fold": fold and place == "replace",
                    "frozen": fixed,
                    "distil": towards,
                }
            )
    cells: dict[Cell, None] = {}
    for seed, model, task, variant in product(seeds, models, tasks, variants):
        cells[Cell(model, task, seed=seed, **variant, **{**recipe_of(task), **recipe})] = None
    return list(cells)
