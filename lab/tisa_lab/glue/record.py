"""What a finished run leaves behind: one line of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from tisa_lab.glue.cell import Cell
from tisa_lab.sweep import JobRecord


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

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps({"key": self.cell.key, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str) -> "Record":
        """Return the record of one line, or refuse what is not one."""
        try:
            values = json.loads(line)
            key = values.pop("key")
            record = cls(**{**values, "cell": Cell(**values["cell"])})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as wrong:
            raise ValueError(
                f"expected a record of `tisa-lab glue` in one line of JSON, got {line[:60]!r} "
                f"({wrong})"
            ) from None
        if record.cell.key != key:
            raise ValueError(
                f"the record {key} says that its cell is {record.cell.key}: it was changed by "
                "hand, or written by another version of this package"
            )
        return record

    def numbers(self) -> dict[str, Any]:
        """Return what must be the same in every run of the same cell: all but time and place."""
        left_out = ("seconds", "surroundings", "start")
        return {name: value for name, value in asdict(self).items() if name not in left_out}
