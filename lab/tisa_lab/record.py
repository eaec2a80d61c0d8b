"""What every record says about where, when and from what it was made."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tisa

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
