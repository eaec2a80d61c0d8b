"""A run as one sees it: tokens per second, loss, time left."""

import sys
import time
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class View(Protocol):
    """What a run tells."""

    def step(self, done: int, numbers: dict[str, float]) -> None:
        """Tell how far it is."""
        ...

    def say(self, line: str) -> None:
        """Tell something that stays."""
        ...


class Silent:
    """A view that shows nothing."""

    def step(self, done: int, numbers: dict[str, float]) -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Show nothing."""


SILENT = Silent()


class Lines:
    """A line every few seconds, for files and logs."""

    def __init__(self, steps: int, *, label: str = "", seconds: float = 10.0) -> None:
        self.steps, self.seconds, self.label = steps, seconds, label
        self._begun: tuple[float, int] | None = None
        self._last = 0.0

    def step(self, done: int, numbers: dict[str, float]) -> None:
        """Print a line when it is time for one."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = (now, done)
        if now - self._last >= self.seconds or done == self.steps:
            self._last = now
            left = self._left(now, done)
            self.say(f"step {done:,} of {self.steps:,}, {told(numbers)}{left}")

    def say(self, line: str) -> None:
        """Print a line on standard error."""
        print(f"{self.label}{line}", file=sys.stderr, flush=True)

    def _left(self, now: float, done: int) -> str:
        assert self._begun is not None
        since, first = self._begun
        if done <= first:
            return ""
        return f", {spoken((now - since) / (done - first) * (self.steps - done))} left"


class Bar:
    """A progress bar that changes in place."""

    def __init__(self, steps: int, *, label: str = "") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self.label = label
        self.task = self.progress.add_task(label or "begins", total=steps)
        self.progress.start()

    def step(self, done: int, numbers: dict[str, float]) -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=done, description=f"{self.label}{told(numbers)}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(f"{self.label}{line}", highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self.progress.stop()


def view_for(steps: int, *, label: str = "") -> Any:
    """Return a bar in a terminal, lines elsewhere."""
    return Bar(steps, label=label) if sys.stderr.isatty() else Lines(steps, label=label)


def told(numbers: dict[str, float]) -> str:
    """Return the numbers of a run in words."""
    parts = [f"loss {numbers['loss']:.4f}"] if "loss" in numbers else []
    if "tokens_per_second" in numbers:
        parts.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in numbers:
        parts.append(f"MFU {numbers['mfu']:.1%}")
    return ", ".join(parts)


def spoken(seconds: float) -> str:
    """Return a time as people say it."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
