"""`tisa-lab probes`: tasks that only positions solve, at the training length and past it."""

import json
from pathlib import Path


def command(
    *,
    methods: str | None = None,
    tasks: str | None = None,
    length: int = 32,
    steps: int = 600,
    out: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    as_json: bool = False,
) -> None:
    """Train small encoders on five tasks about places, and ask them at 1, 2, 4 and 8 × the length.

    Needs no data. Some minutes on two cores.

    Examples: `tisa-lab probes`,
    `tisa-lab probes --methods tisa,near-far,rotary --tasks find,order --out p`

    Args:
        methods: Position methods, with commas; by default ten.
        tasks: find, copy, reverse, sort, order, with commas.
        length: Of the training inputs, at most.
        steps: Of each method and task.
        out: Folder for probes.json, probes.md and probes.png.
        seed: Of weights and inputs.
        device: cpu or cuda.
        as_json: Print the record.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from tisa.cli.device import checked
    from tisa.positions import METHODS
    from tisa_lab.criteria.figure import require_matplotlib
    from tisa_lab.probes.figure import figure
    from tisa_lab.probes.race import RACERS, ProbeConfig, names_of, race
    from tisa_lab.probes.tables import markdown
    from tisa_lab.probes.tasks import TASKS
    from tisa_lab.record import command_line

    checked(device)
    config = ProbeConfig(length=length, steps=steps, seed=seed)
    chosen = names_of(methods, METHODS, "--methods", RACERS)
    asked = names_of(tasks, TASKS, "--tasks", tuple(TASKS))
    if out is not None:
        # Before the minutes of training, not after them.
        require_matplotlib()
        out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task_bar = bar.add_task("", total=len(chosen) * len(asked), completed=-1)
        record = race(
            config, chosen, asked, device=device, command=command_line(),
            progress=lambda method, task: bar.update(
                task_bar, advance=1, description=f"{task}: {method}"
            ),
        )  # fmt: skip
    if out is not None:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        (out / "probes.json").write_text(text, encoding="utf-8")
        (out / "probes.md").write_text(markdown(record), encoding="utf-8")
        figure(record).savefig(out / "probes.png", dpi=130)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record))
