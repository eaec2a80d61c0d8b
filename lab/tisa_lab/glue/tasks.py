"""The eight tasks of Table 3: their files, columns and labels, how they are scored and trained.

File names, columns and labels are those of the official GLUE archives; `hub` is the name of the
same data in `datasets` ("nyu-mll/glue"). The recipe of a task is ALBERT's own (Lan et al. 2020,
Table 14): the paper's is not published.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How a task is fine-tuned: rate, rows to a step, dropout, steps, and how many warm up."""

    learning_rate: float
    batch_size: int
    dropout: float
    steps: int
    warmup_steps: int


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
MNLI = Recipe(3e-5, 128, 0.0, 10000, 1000)

TASKS = {
    task.name: task
    for task in (
        Task(
            "sst-2", "SST-2", "SST-2", ("sentence",), "label", ("0", "1"), ("accuracy",),
            Recipe(1e-5, 32, 0.0, 20935, 1256), "sst2", ("sentence",),
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
            ("f1", "accuracy"), Recipe(5e-5, 128, 0.1, 14000, 1000), "qqp",
            ("question1", "question2"), may_have_short_rows=True,
        ),
        Task(
            "sts-b", "STS-B", "STS-B", PAIR, "score", (), ("pearson", "spearman"),
            Recipe(2e-5, 16, 0.0, 3598, 214), "stsb", PAIR,
        ),
        Task(
            "cola", "CoLA", "CoLA", (3,), 1, ("0", "1"), ("matthews", "accuracy"),
            Recipe(1e-5, 16, 0.0, 5336, 320), "cola", ("sentence",),
        ),
        Task(
            "mrpc", "MRPC", "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"),
            ("f1", "accuracy"), Recipe(2e-5, 32, 0.0, 800, 200), "mrpc", PAIR,
        ),
        Task(
            "qnli", "QNLI", "QNLI", ("question", "sentence"), "label",
            ("entailment", "not_entailment"), ("accuracy",),
            Recipe(1e-5, 32, 0.0, 33112, 1986), "qnli", ("question", "sentence"),
        ),
        Task(
            "rte", "RTE", "RTE", PAIR, "label", ("entailment", "not_entailment"), ("accuracy",),
            Recipe(3e-5, 32, 0.1, 800, 200), "rte", PAIR,
        ),
    )
}  # fmt: skip


def task_named(name: str) -> Task:
    """Return the task of that name, or refuse an unknown one."""
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
