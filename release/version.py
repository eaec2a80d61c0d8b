"""The version of both distributions: set in every file that has it, or a version's notes printed.

python release/version.py                 # the version; an error where files do not agree
python release/version.py set 0.2.0       # before the commit that is tagged
python release/version.py notes v0.2.0    # what CHANGELOG.md says of it, if it is this tree's
"""

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Where the version stands: what is before it in the file, and what is after it.
PLACES = {
    "tisa/__init__.py": ('__version__ = "', '"'),
    "lab/tisa_lab/__init__.py": ('__version__ = "', '"'),
    "lab/pyproject.toml": ('"tisa[analysis,hf]==', '"'),
    "CITATION.cff": ("\nversion: ", "\n"),
}
NUMBER = r"\d+\.\d+\.\d+"
HEADING = re.compile(
    rf"^## (Unreleased \({NUMBER}\)|{NUMBER} \(\d{{4}}-\d\d-\d\d\))\n", re.MULTILINE
)


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each file has."""
    found = {}
    for path, (before, after) in PLACES.items():
        text = (root / path).read_text("utf-8")
        (found[path],) = re.findall(f"{re.escape(before)}({NUMBER}){re.escape(after)}", text)
    return found


def version(root: Path = ROOT) -> str:
    """Return the version of the tree, which all its files have."""
    found = versions(root)
    if len({*found.values()}) > 1:
        raise ValueError(f"versions must be the same in all files, got {found}; set one of them")
    return next(iter(found.values()))


def sections(root: Path = ROOT) -> dict[str, str]:
    """Return what the changelog says of each version, newest first, by its heading."""
    parts = HEADING.split((root / "CHANGELOG.md").read_text("utf-8"))[1:]
    return {
        heading: text.strip("\n") for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def notes(tag: str, root: Path = ROOT) -> str:
    """Return what the changelog says of the tag's version, which must be the tree's."""
    if tag != f"v{version(root)}":
        raise ValueError(f"tag must be v{version(root)}, the version of this tree, got {tag!r}")
    for heading, text in sections(root).items():
        if heading.startswith(f"{tag[1:]} ("):
            return text
    raise ValueError(f"CHANGELOG.md has no section {tag[1:]!r} with a date; set the version first")


def set_version(new: str, today: datetime.date, root: Path = ROOT) -> None:
    """Write the version into every file, and the day over what was not released before."""
    if not re.fullmatch(NUMBER, new):
        raise ValueError(f"version must be three numbers such as 0.2.0, got {new!r}")
    waiting = [heading for heading in sections(root) if heading == f"Unreleased ({new})"]
    if not waiting:
        raise ValueError(f"CHANGELOG.md must have a section 'Unreleased ({new})', and has none")
    for path, (before, after) in PLACES.items():
        text = (root / path).read_text("utf-8")
        pattern = f"({re.escape(before)}){NUMBER}({re.escape(after)})"
        (root / path).write_text(re.sub(pattern, rf"\g<1>{new}\g<2>", text), "utf-8")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    changelog.write_text(text.replace(f"## {waiting[0]}\n", f"## {new} ({today})\n"), "utf-8")


def main(arguments: list[str]) -> None:
    """Do what the words ask for."""
    match arguments:
        case []:
            print(version())
        case ["set", new]:
            set_version(new, datetime.date.today())
        case ["notes", tag]:
            print(notes(tag))
        case _:
            raise ValueError(
                f"asked for must be nothing, set VERSION or notes TAG, got {arguments}"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as wrong:
        sys.exit(str(wrong))
