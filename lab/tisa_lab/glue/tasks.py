"""The eight tasks of Table 3: how they are trained, read and scored.

File names, columns and labels are those of the official GLUE archives; `hub` is the name of the
same data in `datasets` ("nyu-mll/glue"). The recipe of a task is ALBERT's own (Lan et al. 2020,
Table 14): the paper's is not published.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tisa.packages import needed
from tisa.store import told

# The name under which the hub has the data.
HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Recipe:
    """How a cell is fine-tuned.

    Args:
        learning_rate: of the model's own weights.
        scores_learning_rate: of kernels and folded vectors; by default ten times learning_rate.
        batch_size: rows to a step.
        dropout: everywhere in the model.
        steps: of the optimiser.
        epochs: passes over the training rows, in place of steps.
        warmup: a share of the steps.
        weight_decay: of the weights, biases and norms aside.
        max_length: tokens of a row; longer texts are cut.
        train_rows: only the first so many training rows.
        evaluations: how often the dev set is measured.
        calibration_rows: training rows that kernels are fitted and vectors folded on.
        batches: padded ones of similar length, or packed ones without any padding.
    """

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
    batches: Literal["padded", "packed"] = "padded"

    def __post_init__(self) -> None:
        if self.batches not in ("padded", "packed"):
            raise ValueError(f"batches must be padded or packed, got {self.batches!r}")
        for name in ("batch_size", "max_length", "evaluations", "calibration_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("steps", "train_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, or None, got {value}")
        for name in ("learning_rate", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")
        # Nobody else would refuse a negative one: the kernels would be trained uphill.
        for name in ("scores_learning_rate", "weight_decay"):
            if not 0 <= (getattr(self, name) or 0.0) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= (self.dropout or 0.0) < 1:
            raise ValueError(f"dropout must be a share from 0 to below 1, got {self.dropout}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share of the steps below 1, got {self.warmup}")

    def total_steps(self, rows: int) -> int:
        """Return how many steps are made with that many training rows."""
        return self.steps or max(1, math.ceil(self.epochs * math.ceil(rows / self.batch_size)))


def _albert(rate: float, batch: int, dropout: float, steps: int, warmup_steps: int) -> Recipe:
    return Recipe(
        learning_rate=rate, batch_size=batch, dropout=dropout, steps=steps,
        warmup=warmup_steps / steps,
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One task: its files, its columns (by name, or by number where there is no header)."""

    name: str
    title: str
    folder: str
    texts: tuple[str | int, ...]
    label: str | int
    # In the order of the hub's numbers; empty: a number between `low` and `high`.
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    recipe: Recipe
    hub: str | None
    hub_texts: tuple[str, ...]
    train: str = "train.tsv"
    # What is added to a metric's name, and the file; the hub's splits beside it.
    dev: tuple[tuple[str, str, str], ...] = (("", "dev.tsv", "validation"),)
    # QQP has rows that end early, in the official files too; everywhere else it is a mistake.
    may_have_short_rows: bool = False
    low: float = 0.0
    high: float = 5.0

    @property
    def is_regression(self) -> bool:
        """Return whether the label is a number and not a class."""
        return not self.labels

    @property
    def main_metric(self) -> str:
        """Return the metric that stands in Table 3."""
        return self.metrics[0]


ENTAILMENT = ("entailment", "neutral", "contradiction")
PAIR = ("sentence1", "sentence2")
MATCHED = ("", "dev_matched.tsv", "validation_matched")
MNLI = _albert(3e-5, 128, 0.0, 10000, 1000)

TASKS = {
    task.name: task
    for task in (
        Task(
            "sst-2", "SST-2", "SST-2", ("sentence",), "label", ("0", "1"), ("accuracy",),
            _albert(1e-5, 32, 0.0, 20935, 1256), "sst2", ("sentence",),
        ),
        Task(
            "mnli", "MNLI", "MNLI", PAIR, "gold_label", ENTAILMENT, ("accuracy",),
            MNLI, "mnli", ("premise", "hypothesis"),
            dev=(MATCHED, ("_mismatched", "dev_mismatched.tsv", "validation_mismatched")),
        ),
        # A published subset of the training rows: never to be called MNLI.
        Task(
            "mnli-10k", "MNLI-10k", "MNLI", PAIR, "gold_label", ENTAILMENT, ("accuracy",),
            MNLI, None, (), train="train_10k.tsv", dev=(MATCHED,),
        ),
        Task(
            "qqp", "QQP", "QQP", ("question1", "question2"), "is_duplicate", ("0", "1"),
            ("f1", "accuracy"), _albert(5e-5, 128, 0.1, 14000, 1000), "qqp",
            ("question1", "question2"), may_have_short_rows=True,
        ),
        Task(
            "sts-b", "STS-B", "STS-B", PAIR, "score", (), ("pearson", "spearman"),
            _albert(2e-5, 16, 0.0, 3598, 214), "stsb", PAIR,
        ),
        Task(
            "cola", "CoLA", "CoLA", (3,), 1, ("0", "1"), ("matthews", "accuracy"),
            _albert(1e-5, 16, 0.0, 5336, 320), "cola", ("sentence",),
        ),
        Task(
            "mrpc", "MRPC", "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"),
            ("f1", "accuracy"), _albert(2e-5, 32, 0.0, 800, 200), "mrpc", PAIR,
        ),
        Task(
            "qnli", "QNLI", "QNLI", ("question", "sentence"), "label",
            ("entailment", "not_entailment"), ("accuracy",),
            _albert(1e-5, 32, 0.0, 33112, 1986), "qnli", ("question", "sentence"),
        ),
        Task(
            "rte", "RTE", "RTE", PAIR, "label", ("entailment", "not_entailment"), ("accuracy",),
            _albert(3e-5, 32, 0.1, 800, 200), "rte", PAIR,
        ),
    )
}  # fmt: skip


def task_named(name: str) -> Task:
    """Return the task of that name, or refuse an unknown one."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


class Example(NamedTuple):
    """One row: a text or a pair of texts, and the number of its class or its score."""

    texts: tuple[str, ...]
    label: float


class Data(NamedTuple):
    """All rows of a task: for training, and by the suffix of the metric for each dev set."""

    train: list[Example]
    dev: dict[str, list[Example]]
    # Rows that the official files have and nobody can read (QQP).
    left_out: int

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ where any row differs."""
        digest = hashlib.sha256()
        for name, rows in (("train", self.train), *self.dev.items()):
            digest.update(f"{name}\x1d".encode())
            for row in rows:
                digest.update(("\x1f".join(row.texts) + f"\x1e{row.label!r}\x1d").encode())
        return digest.hexdigest()[:16]


def read(task: Task, data_dir: str | Path | None = None) -> Data:
    """Return a task's rows: from `data_dir` where one is given, else from the hub.

    `data_dir` holds a folder for each task, or is the task's folder itself.
    """
    if data_dir is None:
        return _from_hub(task)
    folder = _folder(task, Path(data_dir))
    train, left_out = _file(task, folder / task.train)
    dev = {}
    for suffix, name, _ in task.dev:
        dev[suffix], more = _file(task, folder / name)
        left_out += more
    return Data(train, dev, left_out)


def _folder(task: Task, data_dir: Path) -> Path:
    for folder in (data_dir / task.folder, data_dir):
        if (folder / task.train).is_file():
            missing = [name for _, name, _ in task.dev if not (folder / name).is_file()]
            if missing:
                raise FileNotFoundError(
                    f"{task.title}: {folder} has {task.train} but not {', '.join(missing)}; "
                    "the official archive has all of them"
                )
            return folder
    raise FileNotFoundError(
        f"{task.title}: no {task.folder}/{task.train} in {data_dir}; give the folder that holds "
        "the folders of the official GLUE archives (data_dir)"
    )


def _file(task: Task, path: Path) -> tuple[list[Example], int]:
    """Return the examples of one TSV file, and how many rows ended early."""
    lines = _lines(path)
    columns = _columns(task, path, next(lines, (0, []))[1]) if _has_header(task) else None
    wanted = [*task.texts, task.label]
    places = [i if columns is None else columns[str(i)] for i in wanted]
    needed = max(int(i) for i in places) + 1 if columns is None else len(columns)
    found, left_out = [], 0
    for number, fields in lines:
        if len(fields) != needed:
            if task.may_have_short_rows and len(fields) < needed:
                left_out += 1
                continue
            raise ValueError(
                f"{path}, line {number}: expected {needed} columns between tabs, got {len(fields)}"
            )
        *texts, label = (fields[int(i)] for i in places)
        found.append(Example(tuple(texts), _label(task, label, f"{path}, line {number}")))
    if not found:
        raise ValueError(f"{path}: expected rows of {task.title}, got none")
    return found, left_out


def _has_header(task: Task) -> bool:
    return isinstance(task.label, str)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not blank."""
    try:
        # Fields hold bare quotation marks, and no line break but the row's own.
        with told(path, reading=True):
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise ValueError(
            f"{path}: expected UTF-8, got the byte 0x{wrong.object[wrong.start]:02x} at place "
            f"{wrong.start}; convert the file, for example with iconv"
        ) from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line.split("\t")


def _columns(task: Task, path: Path, header: list[str]) -> dict[str, int]:
    columns = {name: place for place, name in enumerate(header)}
    missing = [str(name) for name in (*task.texts, task.label) if str(name) not in columns]
    if missing:
        raise ValueError(
            f"{path}: expected the columns {', '.join(map(str, (*task.texts, task.label)))} in its "
            f"first line, got {', '.join(header[:12])}: {', '.join(missing)} is missing"
        )
    return columns


def _label(task: Task, label: str, where: str) -> float:
    if not task.is_regression:
        if label not in task.labels:
            raise ValueError(
                f"{where}: expected a label among {', '.join(task.labels)}, got {label!r}"
            )
        return float(task.labels.index(label))
    try:
        score = float(label)
    except ValueError:
        score = float("nan")
    if not task.low <= score <= task.high:
        raise ValueError(
            f"{where}: expected a score between {task.low:g} and {task.high:g}, got {label!r}"
        )
    return score


def _from_hub(task: Task) -> Data:
    if task.hub is None:
        raise ValueError(f"{task.title} is not on the hub; give the folder of its files (data_dir)")
    datasets = needed("datasets", "GLUE from the hub (data_dir is a folder of files)", "tisa-lab")
    loaded: Any = datasets.load_dataset(HUB, task.hub)
    dev = {suffix: _split(task, loaded[split], split) for suffix, _, split in task.dev}
    return Data(_split(task, loaded["train"], "train"), dev, 0)


def _split(task: Task, split: Any, name: str) -> list[Example]:
    """Return the examples of one split of the hub, in which classes are numbers already."""
    missing = sorted({*task.hub_texts, "label"} - set(split.column_names))
    if missing:
        raise ValueError(
            f"{HUB}, {task.hub}, {name}: expected a column {', '.join(missing)}, "
            f"got {', '.join(split.column_names)}"
        )
    found = []
    for row in split:
        label = float(row["label"])
        if not task.is_regression and int(label) not in range(len(task.labels)):
            raise ValueError(f"{HUB}, {task.hub}, {name}: the class {label:g} is unknown")
        found.append(Example(tuple(row[text] for text in task.hub_texts), label))
    return found


def score(task: Task, predictions: Any, labels: Any) -> dict[str, float]:
    """Return the task's metrics times 100, by name, the one of Table 3 first.

    `predictions` are what the model's head gives: a number for each row, or one for each class.
    A correlation of predictions that are all the same is 0, not NaN.
    """
    stats = needed("scipy.stats", "the metrics of GLUE", "tisa-lab")
    measured = needed("sklearn.metrics", "the metrics of GLUE", "tisa-lab")
    if task.is_regression:
        values = predictions.reshape(len(labels))
        measures: dict[str, Any] = {
            "pearson": lambda: stats.pearsonr(labels, values).statistic,
            "spearman": lambda: stats.spearmanr(labels, values).statistic,
        }
        if values.min() == values.max():
            return dict.fromkeys(task.metrics, 0.0)
    else:
        values = predictions.argmax(-1)
        labels = labels.astype(int)
        measures = {
            "accuracy": lambda: measured.accuracy_score(labels, values),
            "f1": lambda: measured.f1_score(labels, values, zero_division=0.0),
            "matthews": lambda: measured.matthews_corrcoef(labels, values),
        }
    with warnings.catch_warnings():
        # Early in training all predictions may be one class: 0 is the answer, not an accident.
        warnings.simplefilter("ignore")
        return {name: 100 * float(measures[name]()) for name in task.metrics}
