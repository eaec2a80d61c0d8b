"""`tisa doctor`: what works on this machine, and why the rest does not."""

import json


def command(
    *,
    as_json: bool = False,
) -> None:
    """Say what is installed, and try every backend on every device.

    Each backend makes one small training step, whose gradients are compared with float64.

    Examples: `tisa doctor`, `tisa doctor --json`

    Args:
        as_json: Print everything as JSON instead of tables.
    """
    from rich.console import Console
    from rich.table import Table

    from tisa.doctor import OPTIONAL, examined

    found = examined()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console()
    for name, version in found["versions"].items():
        wanted = OPTIONAL.get(name, "")
        remedy = wanted if " " in wanted else f"pip install 'tisa[{wanted}]'"
        console.print(f"{name:16} {version or f'not installed: {remedy}'}", markup=False)
    for name, described in found["devices"].items():
        console.print(f"{name:16} {described}", markup=False)
    console.print(f"{'launches':16} {found['launches']}", markup=False)
    table = Table("device", "dtype", "backend", "works", "why not")
    for trial in found["backends"]:
        mark = "✓" if trial["works"] else "–"
        table.add_row(trial["device"], trial["dtype"], trial["backend"], mark, trial["reason"])
    console.print(table)
