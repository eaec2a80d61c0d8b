"""How far something is, as one sees it: a picture in a terminal, lines in a file, or nothing.

One run tells `step`. A sweep tells `step` for whole jobs, and `started`, `inside`, `ended` for the
jobs that run. What stays is said with `say`, one line that is never broken in two.

    with view_for() as view:
        view.begin(1000, unit="steps")
        view.step(10, "loss 2.31")
        view.say("validation loss 2.40 after 10 steps")
"""

import math
import sys
import time
from typing import Any

# Jobs that run and have a line of their own.
SHOWN = 8


class Silent:
    """A view that shows nothing, and what the others have in common."""

    def __init__(self) -> None:
        self.total, self.done, self.unit = 0, 0, "steps"
        self._since = (time.monotonic(), 0)

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, total: int, done: int = 0, *, unit: str = "steps") -> None:
        """Hear how many there are, and how many of them were done before."""
        self.total, self.done, self.unit = total, done, unit
        self._since = (time.monotonic(), done)

    def step(self, done: int, told: str = "", *, left: float | None = None) -> None:
        """Hear how many are done, something about it, and the seconds left if the caller knows."""
        self.done = done

    def started(self, name: str) -> None:
        """Hear that a job runs."""

    def inside(self, told: str) -> None:
        """Hear how far the jobs are that run in this process."""

    def ended(self, name: str) -> None:
        """Hear that a job does not run any more."""

    def say(self, line: str, *, wrong: bool = False) -> None:
        """Hear something that stays."""

    def seconds_left(self) -> float | None:
        """Return the time that the rest takes at the speed until now, None at the beginning."""
        since, first = self._since
        if self.done <= first:
            return None
        return (time.monotonic() - since) / (self.done - first) * (self.total - self.done)


class Lines(Silent):
    """A line for what is said, and one every few seconds for what is told of steps."""

    def __init__(self, file: Any = None, *, seconds: float = 10.0) -> None:
        super().__init__()
        self.file, self.seconds = file, seconds
        self._last = -math.inf  # a monotonic clock may begin at 0

    def step(self, done: int, told: str = "", *, left: float | None = None) -> None:
        """Print a line when it is time for one."""
        super().step(done, told, left=left)
        now = time.monotonic()
        if told and (now - self._last >= self.seconds or done == self.total):
            self._last = now
            left = self.seconds_left() if left is None else left
            more = "" if left is None else f", {spoken(left)} left"
            self.say(f"{self.unit.removesuffix('s')} {done:,} of {self.total:,}, {told}{more}")

    def say(self, line: str, *, wrong: bool = False) -> None:
        """Print a line, on standard error unless told."""
        print(line, file=self.file or sys.stderr, flush=True)


class Live(Silent):
    """A picture that changes in place: what runs, a bar, the time left."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live as Picture

        super().__init__()
        self.console = console or Console(stderr=True)
        self._running: dict[str, float] = {}
        self._inside = self._told = ""
        self._left: float | None = None
        self._picture = Picture(
            get_renderable=self.picture, console=self.console, refresh_per_second=2, transient=True
        )

    def __enter__(self) -> "Live":
        self._picture.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._picture.stop()

    def step(self, done: int, told: str = "", *, left: float | None = None) -> None:
        """Move the bar."""
        super().step(done, told, left=left)
        self._told, self._left = told, left

    def started(self, name: str) -> None:
        """Give a job its line."""
        self._running[name] = time.monotonic()

    def inside(self, told: str) -> None:
        """Show it beside the jobs that run."""
        self._inside = told

    def ended(self, name: str) -> None:
        """Take its line away."""
        self._running.pop(name, None)
        self._inside = ""

    def say(self, line: str, *, wrong: bool = False) -> None:
        """Print a line above the picture."""
        from rich.text import Text

        self.console.print(Text(line, style="red" if wrong else ""), soft_wrap=True)

    def picture(self) -> Any:
        """Return what is shown now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2))
        for name, since in list(self._running.items())[:SHOWN]:
            table.add_row("runs", Text(name), spoken(time.monotonic() - since), Text(self._inside))
        if len(self._running) > SHOWN:
            table.add_row("", f"and {len(self._running) - SHOWN} beside them", "", "")
        left = self.seconds_left() if self._left is None else self._left
        words = [f"{self.done:,} of {self.total:,} {self.unit} done", self._told]
        words += [] if left is None else [f"about {spoken(left)} left"]
        bar = ProgressBar(total=max(1, self.total), completed=self.done, width=40)
        return Group(table, bar, Text(", ".join(word for word in words if word)))


def view_for(*, shown: bool = True) -> Silent:
    """Return a picture in a terminal, lines elsewhere; nothing where it is not to be shown."""
    if not shown:
        return Silent()
    return Live() if sys.stderr.isatty() else Lines()


def spoken(seconds: float) -> str:
    """Return a time as people say it."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
