"""What PyPI shows: the README, with links that lead somewhere, and the project's addresses.

Links of the README are relative to its repository, of which PyPI knows nothing. TISA_REPOSITORY, an
address such as https://host/owner/name, says where this repository is public while a distribution
is built; the release workflow sets it to where it runs. Links then lead to the files of the
version's tag. Without it they are their words alone.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://aclanthology.org/2021.acl-short.18/"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def described(readme: str, version: str, repository: str | None) -> str:
    """Return the README with its relative links led to the tag of the version, or taken out."""

    def outside(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if not repository:
            return f"*{text}*" if picture else text
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(outside, readme)


def addresses(version: str, repository: str | None) -> dict[str, str]:
    """Return the project's addresses by their labels on PyPI."""
    if not repository:
        return {"Paper": PAPER}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Paper": PAPER,
    }


def repository_told() -> str | None:
    """Return the address that TISA_REPOSITORY holds, None without one."""
    address = os.environ.get("TISA_REPOSITORY", "").rstrip("/")
    if address and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        raise ValueError(
            f"TISA_REPOSITORY must be an address such as https://host/owner/name, got {address!r}"
        )
    return address or None


class Description(MetadataHookInterface):
    """Sets `readme` and `urls` of pyproject.toml while a distribution is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write both into the metadata."""
        repository, version = repository_told(), metadata["version"]
        readme = (Path(self.root) / "README.md").read_text("utf-8")
        text = described(readme, version, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(version, repository)
