"""Write docs/licences.md from what the installed packages say of themselves.

    python docs/licences.py

Asked are the packages of this environment (`make test` sets it up with every extra).
"""

import re
import tomllib
from email.message import Message
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = ("tisa", "tisa-lab")
INTRODUCTION = """# Licences of what tisa needs

tisa and tisa-lab have the MIT licence. Neither contains code of a package below: pip installs them
beside it, each under its own licence. `docs/licences.py` writes this page from what the packages
say of themselves; the words are theirs. They were read on Linux with torch's build for CPUs. Its
builds for CUDA bring NVIDIA's libraries (`nvidia-…`, `cuda-…`), most under NVIDIA's own terms.
"""


def normal(name: str) -> str:
    """Return a distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirement: str) -> tuple[str, set[str]]:
    """Return the name at the beginning of a requirement, and the extras in its brackets."""
    name, extras = re.findall(r"^([\w.-]+)(?:\[([\w,\s.-]+)\])?", requirement)[0]
    return normal(name), {normal(extra.strip()) for extra in extras.split(",") if extra}


def direct() -> dict[str, list[str]]:
    """Return what asks for each package: `tisa`, an extra, both by their order in the files."""
    found: dict[str, list[str]] = {}
    for path in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((ROOT / path).read_text("utf-8"))["project"]
        lists = {"": project["dependencies"], **project.get("optional-dependencies", {})}
        for extra, requirements in lists.items():
            asks = project["name"] + (f"[{extra}]" if extra else "")
            for requirement in requirements:
                name = named(requirement)[0]
                if name not in OWN:
                    found.setdefault(name, []).append(asks)
    return found


def brought_along() -> set[str]:
    """Return the packages that our own bring here with all their extras, besides direct ones."""
    found: set[tuple[str, str]] = set()
    left = [("tisa", "dev"), ("tisa-lab", "cluster")]
    while left:
        name, extra = left.pop()
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            # Another system's, or another Python's.
            continue
        found.add((name, extra))
        for need in needs:
            condition = re.findall(r"extra == ['\"]([\w.-]+)['\"]", need)
            if not condition or normal(condition[0]) == extra:
                other, extras = named(need)
                left += [(other, e) for e in ("", *extras) if (other, e) not in found]
    return {name for name, _ in found} - {*direct(), *OWN}


def licence(about: Message) -> str:
    """Return a package's licence as its metadata has it: expression, classifiers or first line."""
    if about["License-Expression"]:
        return about["License-Expression"]
    classes = about.get_all("Classifier", [])
    told = [c.rpartition(" :: ")[2] for c in classes if c.startswith("License :: ")]
    told = [word for word in told if word != "OSI Approved"]
    if told:
        return ", ".join(told)
    lines = (about["License"] or "").strip().splitlines()
    return lines[0] if lines else "not told"


def page() -> str:
    """Return docs/licences.md."""
    asked = direct()
    text = [
        INTRODUCTION,
        "## Asked for by name\n",
        "| package | licence | asked for by |",
        "|---|---|---|",
    ]
    for name in sorted(asked):
        text.append(
            f"| {name} | {licence(metadata(name))} | {', '.join(f'`{a}`' for a in asked[name])} |"
        )
    text += ["\n## What those bring along\n", "| package | licence |", "|---|---|"]
    text += [f"| {n} | {licence(metadata(n))} |" for n in sorted(brought_along())]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/licences.md").write_text(page(), "utf-8")
