"""What a release is made of: versions, notes, PyPI's page, workflows, images, licences."""

import datetime
import importlib.util
import re
import shutil
import tomllib
from email.message import Message
from pathlib import Path

import pytest
import yaml

import tisa

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROJECTS = {
    name: tomllib.loads((ROOT / path).read_text())["project"]
    for name, path in (("tisa", "pyproject.toml"), ("tisa-lab", "lab/pyproject.toml"))
}


def loaded(path):
    """Return a script of the repository that lies in no package."""
    source = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


description, version, licences = map(
    loaded, ("release/description.py", "release/version.py", "docs/licences.py")
)


@pytest.fixture
def tree(tmp_path):
    """Return a folder with the files that have a version."""
    for path in [*version.PLACES, "CHANGELOG.md"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_every_file_has_the_version_and_the_changelog_its_notes():
    assert version.version() == tisa.__version__
    headings = [*version.sections()]
    assert re.fullmatch(rf"Unreleased \({version.NUMBER}\)", headings[0])
    assert all(version.sections().values())
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(headings) == text.count("\n## "), "a heading that is no version's"
    numbers = [[*map(int, re.findall(r"\d+", h)[:3])] for h in headings]
    assert numbers == sorted(numbers, reverse=True)


def test_a_version_is_set_everywhere_and_its_tag_finds_the_notes(tree):
    (waiting, _), *_ = version.sections(tree).items()
    new = re.findall(version.NUMBER, waiting)[0]
    with pytest.raises(ValueError, match="tag must be"):
        version.notes(f"v{new}", tree)
    version.set_version(new, datetime.date(2031, 2, 3), tree)
    assert version.version(tree) == new
    assert f"## {new} (2031-02-03)\n" in (tree / "CHANGELOG.md").read_text()
    assert version.notes(f"v{new}", tree) == version.sections()[waiting]
    with pytest.raises(ValueError, match="must have a section"):
        version.set_version("9.9.9", datetime.date(2031, 2, 3), tree)
    lab = tree / "lab/pyproject.toml"
    lab.write_text(lab.read_text().replace(f"=={new}", "==0.0.1"))
    with pytest.raises(ValueError, match="must be the same in all files"):
        version.version(tree)


def test_links_on_pypi_lead_to_the_tag_or_are_words():
    readme = (ROOT / "README.md").read_text()
    paths = re.findall(r"\]\((?!https://)([^)#]+)", readme)
    assert len(paths) > 20
    led = description.described(readme, "1.2.3", "https://host.example/a/b")
    links = re.findall(r"\]\(([^)]+)\)", led)
    assert all(link.startswith("https://") for link in links)
    place = "https://host.example/a/b/{}/v1.2.3/{}"
    assert place.format("raw", "docs/figures/pretrain/rates.png") in links
    assert place.format("blob", "docs/results.md#what-came-out") in links
    plain = description.described(readme, "1.2.3", None)
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", plain))
    # Nothing but links is another text.
    bare = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", readme)
    assert re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", led) == bare


@pytest.mark.parametrize(
    "told", ["", "https://host.example/a/b/", "host/a", "http://host.example/a"]
)
def test_the_address_is_the_environments(monkeypatch, told):
    monkeypatch.setenv("TISA_REPOSITORY", told)
    if told.startswith("https") or not told:
        address = description.repository_told()
        found = description.addresses("1.2.3", address)
        assert found["Paper"] == description.PAPER
        assert (found.get("Repository") == "https://host.example/a/b") == bool(told)
    else:
        with pytest.raises(ValueError, match="must be an address"):
            description.repository_told()


def test_every_workflow_and_form_is_whole():
    assert {path.stem for path in WORKFLOWS} == {"docs", "release", "test"}
    for path in WORKFLOWS:
        flow = yaml.safe_load(path.read_text())
        # YAML's first version reads `on` as a truth.
        assert {"name", True, "permissions", "jobs"} <= set(flow)
        assert flow["permissions"] == {"contents": "read"}
        for job in flow["jobs"].values():
            assert not {*re.findall(r"\w+", str(job.get("needs", "")))} - set(flow["jobs"])
            for step in job["steps"]:
                # A tag can be moved, a commit cannot.
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a@{40 * '0'}"))
                for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert {"name", "description", "body"} <= set(form)
            named = [part["id"] for part in form["body"] if part["type"] != "markdown"]
            assert len(named) == len({*named}) > 0


def test_a_tag_tests_builds_checks_and_publishes_without_a_password():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    runs = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    for line in (
        'python release/version.py notes "$GITHUB_REF_NAME" > notes.md', "make test",
        "python -m build --outdir dist .", "python -m build --outdir dist lab",
        "twine check --strict dist/*",
    ):  # fmt: skip
        assert line in runs, line
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text
    assert "TISA_REPOSITORY" in text


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_the_demo_as_nobody_special(name):
    lines = [
        line for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines()
        if line and not line.startswith("#")
    ]  # fmt: skip
    assert lines[0].startswith("FROM python:3.11")
    assert lines[-1] == 'CMD ["make", "demo"]'
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 1000"]
    # What is made before the demo is what `make demo` asks for.
    assert "RUN make .venv/.ready" in lines
    assert "READY := .venv/.ready" in (ROOT / "Makefile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", ".git", "demo"} <= {*ignored}


def test_condas_environment_has_both_distributions():
    made = yaml.safe_load((ROOT / "environment.yml").read_text())
    (through_pip,) = [part["pip"] for part in made["dependencies"] if isinstance(part, dict)]
    extras = PROJECTS["tisa"]["optional-dependencies"]
    (asked,) = re.findall(r"\.\[([\w,]+)\]", through_pip[0])
    assert {*asked.split(",")} <= {*extras}
    assert through_pip[1] == "--editable ./lab"
    assert {"python=3.11", "make", "pip"} <= {*map(str, made["dependencies"])}


def test_both_distributions_say_the_same_of_themselves():
    ours, labs = PROJECTS.values()
    for name in ("license", "license-files", "requires-python", "authors", "classifiers"):
        assert ours[name] == labs[name], name
    assert (ROOT / "LICENSE").read_text() == (ROOT / "lab/LICENSE").read_text()


def test_dependencies_have_lower_bounds_and_no_upper_ones():
    """An upper bound needs a reason, and there is none today (docs/log.md, newest versions)."""
    for project in PROJECTS.values():
        lists = [project["dependencies"], *project["optional-dependencies"].values()]
        for requirement in (r for each in lists for r in each if not r.startswith("tisa")):
            assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+(; .*)?", requirement), requirement


def table(page):
    return dict(re.findall(r"^\| ([\w.-]+) \| ([^|]+?) \|", page, flags=re.MULTILINE))


def test_every_package_asked_for_is_on_the_page_of_licences():
    found = table((ROOT / "docs/licences.md").read_text())
    assert {*licences.direct()} <= {*found}
    assert "not told" not in found.values()
    assert not [n for n, told in found.items() if re.search(r"\bA?GPL|General Public", told)]


@pytest.mark.full
def test_every_package_that_is_installed_is_on_the_page_of_licences():
    """Apart from those above: what others bring changes with their versions."""
    found = table((ROOT / "docs/licences.md").read_text())
    # CUDA comes with torch where there is none of its builds for CPUs.
    here = {n for n in licences.brought_along() if not n.startswith(("nvidia-", "cuda-"))}
    assert here <= {*found}


def test_a_licence_is_read_where_a_package_has_it():
    about = Message()
    assert licences.licence(about) == "not told"
    about["License"] = "Some words\nand a text"
    assert licences.licence(about) == "Some words"
    about["Classifier"] = "Programming Language :: Python"
    about["Classifier"] = "License :: OSI Approved :: MIT License"
    assert licences.licence(about) == "MIT License"
    about["License-Expression"] = "MIT"
    assert licences.licence(about) == "MIT"
    assert licences.named("mkdocstrings[python]>=0.29") == ("mkdocstrings", {"python"})
    assert licences.named("ml_dtypes; extra == 'x'") == ("ml-dtypes", set())
