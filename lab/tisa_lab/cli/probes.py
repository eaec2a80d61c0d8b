"""`tisa-lab probes`: tasks that only positions solve, at the training length and past it."""

import json
from pathlib import Path

from tisa_lab.probes.race import RACERS, ProbeConfig, run_race
from tisa_lab.probes.tasks import TASKS

CONFIG = ProbeConfig()


def command(
    *,
    methods: tuple[str, ...] = RACERS,
    tasks: tuple[str, ...] = tuple(TASKS),
    config: ProbeConfig = CONFIG,
    out: Path | None = None,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Train small encoders on five tasks about places, and ask them at 1, 2, 4 and 8 × the length.

    Needs no data. Some minutes on two cores.

    Examples: `tisa-lab probes`,
    `tisa-lab probes --methods tisa,near-far,rotary --tasks find,order --out p`

    Args:
        methods: Position methods, by name or as my_file.py:Class.
        tasks: Tasks, by name.
        config: Sizes and recipe.
        out: Folder for probes.json, probes.md and probes.png.
        device: By default a GPU where there is one.
        as_json: Print the record.
    """
    from tisa.packages import needed
    from tisa.store import own_folder
    from tisa_lab.probes.report import markdown, write
    from tisa_lab.record import command_line
    from tisa_lab.view import view_for

    if out is not None:
        # Before the minutes of training, not after them.
        needed("matplotlib", "figures", "tisa-lab")
    with own_folder(out, own=("probes.json",)):
        with view_for() as view:
            view.begin(len(set(methods)) * len(set(tasks)), -1, unit="models")
            record = run_race(
                config, methods, tasks, device=device, command=command_line(),
                progress=lambda method, task: view.step(view.done + 1, f"{task}: {method}"),
            )  # fmt: skip
        if out is not None:
            write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record))
