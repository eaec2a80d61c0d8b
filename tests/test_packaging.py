"""What is installed: the wheel has all of the package, runs with torch and cyclopts alone, and says
which extra brings what is missing."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from own_methods import FUNCTION, METHOD

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("hf", "analysis", "dev")
JUNK = ("__pycache__", ".pyc", ".venv", ".mypy_cache", ".ruff_cache")


def build(kind, folder, project=ROOT):
    program = f"from hatchling import build; print(build.build_{kind}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=project
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def files_of(folder):
    found = (p for p in (ROOT / folder).rglob("*") if p.is_file())
    return {str(p.relative_to(ROOT)) for p in found if not any(j in str(p) for j in JUNK)}


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        about = {
            Path(n).name: archive.read(n).decode() for n in archive.namelist() if n not in names
        }
    assert names == files_of("tisa") | {"pytest_tisa.py"}
    points = "[console_scripts]\ntisa = tisa.cli:main\n\n[pytest11]\npytest_tisa = pytest_tisa"
    assert about["entry_points.txt"].strip() == points
    assert "LICENSE" in about
    metadata = Parser().parsestr(about["METADATA"])
    import tisa

    assert metadata["Version"] == tisa.__version__
    assert any(told.startswith("Paper, https://") for told in metadata.get_all("Project-URL"))
    assert metadata.get_payload().strip().startswith("# tisa\n")
    assert not re.search(r"\]\((?!https://)", metadata.get_payload())
    assert set(EXTRAS) <= set(metadata.get_all("Provides-Extra"))
    assert [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r] == [
        "cyclopts>=5.2",
        "filelock>=3.12",
        "rich>=13.6",
        "torch>=2.9",
    ]


WRONG = FUNCTION.replace("return None", "return torch.full((len(self.rates), 2), 3).int()")


@pytest.mark.full
def test_the_contract_runs_on_anybodys_class_from_the_wheel(wheel, tmp_path):
    """The option is known where the wheel is installed, and what is wrong is found."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "twist.py").write_text(METHOD)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "tisa.testing", "-q", "-p", "no:cacheprovider",
         "-k", "band or no_tokens", "--position", "twist.py:Twist", "--position", "wrong.py:Root"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED .*::(\w+)\[(.+?)[\]-]", done.stdout, flags=re.MULTILINE)
    assert set(failed) == {("test_outside_its_band_nothing_changes", "wrong.py:Root")}
    assert "2 failed, 2 passed, 2 skipped" in done.stdout


@pytest.mark.full
def test_the_whole_contract_holds_for_a_function_and_a_method(tmp_path):
    (tmp_path / "root.py").write_text(FUNCTION)
    (tmp_path / "twist.py").write_text(METHOD)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_tisa", "--pyargs", "tisa.testing", "-q",
         "--position", "root.py:Root", "--position", "twist.py:Twist"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_laboratory_is_a_wheel_of_its_own(tmp_path):
    import tisa
    import tisa_lab

    with zipfile.ZipFile(build("wheel", tmp_path, ROOT / "lab")) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        (about,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert archive.read(about).decode().strip().endswith("tisa-lab = tisa_lab.cli:main")
    assert {f"lab/{name}" for name in names} == files_of("lab/tisa_lab")
    assert tisa_lab.__version__ == tisa.__version__


def test_the_sdist_has_what_make_needs(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    for folder in (
        "tisa", "lab", "tests", "examples", "docs", "benchmarks", "runs", "release", ".github",
    ):  # fmt: skip
        assert files_of(folder) <= names
    assert {"Makefile", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert {"Dockerfile", "Dockerfile.cuda", ".dockerignore", "environment.yml"} <= names
    assert not [n for n in names if any(j in n for j in JUNK)]


def test_the_laboratorys_sdist_makes_its_wheel(tmp_path):
    """By itself: nothing of it lies outside its folder."""
    source = build("sdist", tmp_path, ROOT / "lab")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(build("wheel", tmp_path, tmp_path / source.name[:-7])) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        (licence,) = [n for n in archive.namelist() if n.endswith("/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert {f"lab/{name}" for name in names} == files_of("lab/tisa_lab")


def test_dev_brings_every_other_extra():
    extras = PROJECT["optional-dependencies"]
    for name in extras:
        assert name == "dev" or f"tisa[{name}]" in extras["dev"]


# A package that is not there, what a user runs, and the extra that brings it.
MISSING = [
    ("transformers", "import tisa.hf", "hf"),
    ("transformers", "tisa convert model --out new", "hf"),
    ("matplotlib", "import tisa.analysis.plots", "analysis"),
    ("rich.console", "tisa analyze model", "analysis"),
    ("huggingface_hub", "tisa analyze somebody/model", "analysis"),
    ("matplotlib", "tisa-lab criteria --out new", "lab"),
    ("matplotlib", "tisa-lab probes --methods tisa --tasks find --steps 1 --out new", "lab"),
    ("transformers", "tisa-lab demo --out new", "lab"),
    ("tokenizers", "tisa-lab demo --out new --offline", "lab"),
    ("transformers", "tisa-lab glue model --out new", "lab"),
]  # fmt: skip
# These import transformers whole.
HEAVY = [
    ("accelerate", "tisa-lab glue model --out new", "lab"),
    ("ray", "import tisa_lab.executors as r; r.OnRay(print, None, 1)", "lab[cluster]"),
]
# Torch is imported once; each case is a process of its own from there on.
DRIVER = """
import json, os, sys, tempfile, traceback
import torch, tisa, tisa.cli, tisa_lab.cli
for package, what in json.loads(sys.argv[1]):
    said = tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(said.fileno(), 2)
        sys.modules[package] = None
        try:
            if what.startswith(("tisa ", "tisa-lab ")):
                sys.argv = what.split()
                (tisa if sys.argv[0] == "tisa" else tisa_lab).cli.main()
            exec(what)
        except SystemExit as left:
            sys.stderr.flush(); os._exit(left.code)
        except BaseException:
            traceback.print_exc(); sys.stderr.flush(); os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    print(json.dumps([code, said.read()]))
"""


@pytest.mark.parametrize("cases", [MISSING, pytest.param(HEAVY, marks=pytest.mark.full)])
def test_what_is_missing_is_named_with_its_extra(tmp_path, cases):
    asked = json.dumps([case[:2] for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, asked], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (package, what, extra), (code, said) in zip(cases, answers, strict=True):
        command = what.startswith(("tisa ", "tisa-lab "))
        assert code == (2 if command else 1), (package, what, said)
        wanted = f"tisa-{extra}" if extra.startswith("lab") else f"tisa[{extra}]"
        assert re.search(rf"pip install ['\"]{re.escape(wanted)}['\"]", said), (package, said)
        assert not command or "Traceback" not in said
    assert not list(tmp_path.iterdir())


def required(names):
    """Return the distributions that these need, themselves included."""
    found, left = {}, list(names)
    while left:
        name = re.split(r"[^A-Za-z0-9._-]", left.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        left += [r for r in found[name].requires or () if "extra ==" not in r]
    return found


@pytest.mark.full
def test_the_wheel_in_an_empty_environment(wheel, tmp_path):
    """Nothing but the wheel, and what torch and cyclopts need, linked from this environment."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    (site,) = place.glob("lib/python*/site-packages")
    for made in required(["torch", "cyclopts"]).values():
        for top in {f.parts[0] for f in made.files or () if ".." not in f.parts}:
            if not (site / top).exists() and top != "__pycache__":
                (site / top).symlink_to(made.locate_file(top))
    assert not (site / "transformers").exists()

    def run(*arguments):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=clean)

    said = run(python, "-c", "import tisa; print(tisa.__file__, tisa.TISA(2)(3).shape)")
    assert str(site) in said.stdout, said.stderr
    shown = run(place / "bin" / "tisa", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "doctor" in shown.stdout
    checked = run(place / "bin" / "tisa", "doctor")
    assert checked.returncode == 0, checked.stderr
    assert "pip install 'tisa[hf]'" in checked.stdout
    refused = run(place / "bin" / "tisa", "convert", "model", "--out", "new")
    assert refused.returncode == 2
    assert "pip install 'tisa[hf]'" in refused.stderr
