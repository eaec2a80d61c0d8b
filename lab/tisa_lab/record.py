"""What every record says about where, when and from what it was made, and how it is written."""

import io
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import tisa
from tisa import store
from tisa.positions import Chosen, described

ROOT = Path(__file__).parents[2]
DIRTY = "-dirty"


def surroundings(command: str, device: torch.device) -> dict[str, Any]:
    """Return date, commit, versions, machine and command, for a record."""
    made_from = commit()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": made_from.removesuffix(DIRTY),
        "uncommitted_changes": made_from.endswith(DIRTY),
        "tisa": tisa.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def sources(methods: Iterable[Chosen]) -> dict[str, Any]:
    """Return where the classes of methods came from that are none of the package, by label."""
    return {one.label: source for one in methods if (source := described(one)) is not None}


@cache
def code() -> str:
    """Return the version of the code, for the identity of a run."""
    return f"tisa {tisa.__version__}, commit {commit()}"


def write_record(
    record: Mapping[str, Any],
    out: Path,
    name: str,
    texts: Mapping[str, str],
    figure: Any,
    *,
    indent: int | None = 1,
) -> None:
    """Write NAME.json, the record itself, texts, NAME.png, and the manifest of all of them."""
    text = json.dumps(store.sealed(record), indent=indent, ensure_ascii=False) + "\n"
    whole = ("settings", "config", "surroundings")
    identity = {k: v for k, v in record.items() if k in whole or isinstance(v, str | int | float)}
    files: dict[str, str | bytes] = {f"{name}.json": text, **texts}
    files[f"{name}.png"] = picture(figure)
    store.write_files(out, name, identity | {store.CODE: code()}, files)


def picture(figure: Any, *, dpi: int = 130) -> bytes:
    """Return a figure as PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    return drawn.getvalue()


def commit() -> str:
    """Return the commit of this checkout, with -dirty where something was changed since.

    Where the files were sent elsewhere it is what stands in commit.txt beside them, which the
    sender wrote: `git describe --always --dirty > commit.txt`.
    """
    sent = ROOT / "commit.txt"
    try:
        if sent.is_file():
            return sent.read_text().strip()
        if not (ROOT / ".git").exists():
            return "unknown"
        asked = ["git", "describe", "--always", "--exclude=*", f"--dirty={DIRTY}"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def command_line(*program: str) -> str:
    """Return the command that runs now (`tisa-lab` unless told), quoted for a shell."""
    return shlex.join([*(program or ("tisa-lab",)), *sys.argv[1:]])
