"""What GLUE counts, times 100 as in its tables: by scikit-learn and scipy."""

import warnings
from typing import Any

from tisa_lab.glue.tasks import Task


def score(task: Task, predictions: Any, labels: Any) -> dict[str, float]:
    """Return the task's metrics by name, the one of Table 3 first.

    `predictions` are what the model's head gives: a number for each row, or one for each class.
    A correlation of predictions that are all the same is 0, not NaN.
    """
    try:
        import scipy.stats
        import sklearn.metrics
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the metrics of GLUE need {missing.name}: pip install 'tisa-lab'"
        ) from missing
    if task.is_regression:
        values = predictions.reshape(len(labels))
        measures: dict[str, Any] = {
            "pearson": lambda: scipy.stats.pearsonr(labels, values).statistic,
            "spearman": lambda: scipy.stats.spearmanr(labels, values).statistic,
        }
        if values.min() == values.max():
            return dict.fromkeys(task.metrics, 0.0)
    else:
        values = predictions.argmax(-1)
        labels = labels.astype(int)
        measures = {
            "accuracy": lambda: sklearn.metrics.accuracy_score(labels, values),
            "f1": lambda: sklearn.metrics.f1_score(labels, values, zero_division=0.0),
            "matthews": lambda: sklearn.metrics.matthews_corrcoef(labels, values),
        }
    with warnings.catch_warnings():
        # Early in training all predictions may be one class: 0 is the answer, not an accident.
        warnings.simplefilter("ignore")
        return {name: 100 * float(measures[name]()) for name in task.metrics}
