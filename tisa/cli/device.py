"""What was given as --device, checked before anything is computed."""

import torch


def checked(device: str | None) -> None:
    """Raise ValueError if this machine does not have the device; None is any."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    # Torch says it with a RuntimeError or an AssertionError, by the kind of device.
    except (RuntimeError, AssertionError) as wrong:
        first = str(wrong).splitlines()[0].split(" device type at start")[0]
        raise ValueError(
            f"--device: expected one that this machine has, such as cpu, got {device!r} ({first})"
        ) from None
