"""A flag is True or False, or an error: "no" and a number would be taken as true."""


def check_flags(owner: str, **flags: object) -> None:
    """Refuse those that are no booleans, in the name of the function or class that takes them."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(
                f"{owner}: {name} must be True or False, got {flag!r}; "
                "pass bool(…) of what you mean"
            )
