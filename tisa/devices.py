"""Where to compute: one default, one check, one sentence when it is not there."""

import torch


def device_named(name: str | torch.device | None = None) -> torch.device:
    """Return the device of that name, which this machine has; for None a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    # Torch says it with a RuntimeError or an AssertionError, by the kind of device.
    except (RuntimeError, AssertionError) as wrong:
        first = str(wrong).splitlines()[0].split(" device type at start")[0]
        raise ValueError(
            f"device must be one that this machine has, such as cpu, got {str(name)!r} ({first})"
        ) from None
    return torch.device(name)
