"""Reports of `tisa analyze` in, one dated record out: the numbers that docs/analysis.md quotes."""

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

from tisa_lab.record import commit

# Long lists that no text quotes; the report itself has them.
LEFT_OUT = ("kernels", "kernels_near", "text", "curves")


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    models, about = {}, {}
    for report in arguments.reports:
        numbers = json.loads((report / "numbers.json").read_text())
        about = numbers["about"]
        for model in numbers["models"]:
            fits = {
                name: [sum(row) / len(row) for row in model[name]["r2"]] for name in ("kernels",)
            }
            near = [sum(row) / len(row) for row in model["kernels_near"][0]["r2"]]
            plain = {name: part for name, part in model.items() if name not in LEFT_OUT}
            plain["mean_r2_by_kernels"] = fits["kernels"]
            plain["mean_r2_by_kernels_near"] = near
            models[model["name"]] = plain
    today = datetime.date.today().isoformat()
    record = {
        "date": today,
        "command": "runs/figures.sh",
        "commit": commit(),
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **about,
        "models": list(models.values()),
    }
    path = arguments.out / f"{today}-analysis.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(path)


if __name__ == "__main__":
    main()
