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


def surroundings(command: str, device: torch.device) -> dict[str, Any]:
    """Return date, commit, versions, machine and command, for a record."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "tisa": tisa.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def command_line(*program: str) -> str:
    """Return the command that runs now (`tisa-lab` unless told), quoted for a shell."""
    return shlex.join([*(program or ("tisa-lab",)), *sys.argv[1:]])


def _git(*arguments: str) -> str | None:
    """Return what git says about the checkout that this package lies in, None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
