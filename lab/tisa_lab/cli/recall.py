"""`tisa-lab recall`: what small decoders remember from far away, up to 16 × the training length."""

import json
from pathlib import Path

from tisa_lab.probes.recall import DECODERS, RecallConfig, run_recall

CONFIG = RecallConfig()


def command(
    *,
    methods: tuple[str, ...] = DECODERS,
    config: RecallConfig = CONFIG,
    out: Path | None = None,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Train small decoders on pairs of keys and values, and ask for values from ever farther away.

    Recall has four pairs, a passkey is one. Needs no data. Some minutes on two cores.

    Examples: `tisa-lab recall`,
    `tisa-lab recall --methods tisa,near-far,near-far-fox --steps 4000 --out recall`

    Args:
        methods: Position methods, by name or as my_file.py:Class, also methods for decoders alone.
        config: Sizes and recipe.
        out: Folder for recall.json, recall.md and recall.png.
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
    with own_folder(out, own=("recall.json",)):
        with view_for() as view:
            view.begin(len(set(methods)), -1, unit="models")
            record = run_recall(
                config, methods, device=device, command=command_line(),
                progress=lambda method: view.step(view.done + 1, method),
            )  # fmt: skip
        if out is not None:
            write(record, out)
    print(json.dumps(record, ensure_ascii=False) if as_json else markdown(record))
