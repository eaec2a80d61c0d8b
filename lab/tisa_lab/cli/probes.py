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
    from tisa.packages import needed
    from tisa_lab.probes.race import RACERS, ProbeConfig, race
    from tisa_lab.probes.report import markdown, write
    from tisa_lab.probes.tasks import TASKS
    from tisa_lab.record import command_line
    from tisa_lab.view import view_for

    config = ProbeConfig(length=length, steps=steps, seed=seed)
    chosen = RACERS if methods is None else _names(methods)
    asked = tuple(TASKS) if tasks is None else _names(tasks)
    if out is not None:
        # Before the minutes of training, not after them.
        needed("matplotlib", "figures", "tisa-lab")
        out.mkdir(parents=True, exist_ok=True)
    with view_for() as view:
        view.begin(len(chosen) * len(asked), -1, unit="models")
        record = race(
            config, chosen, asked, device=device, command=command_line(),
            progress=lambda method, task: view.step(view.done + 1, f"{task}: {method}"),
        )  # fmt: skip
    if out is not None:
        write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
