"""Every example, run small as a user would, and whether it shows what it says."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# The README's first figure has its own test, in test_scripts.py.
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "find_the_offset")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what an example prints; in this process, as importing torch takes seconds."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern, text):
    found = re.findall(pattern, text)
    assert found, text
    return [float(x) for x in found]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_has_a_test(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
    assert f'run("{name}"' in Path(__file__).read_text()


def test_own_attention(run):
    said = run("own_attention", "--steps", 90)
    assert numbers(r"(\d+) % right", said)[0] > 90
    assert "-3" in said


def test_hugging_face(run):
    said = run("hugging_face")
    (closeness,) = numbers(r"token by token: ([\d.]+)", said)
    assert 0.8 < closeness < 1
    assert "TisaBertModel without the 2,048 numbers" in said


def test_analyse_a_model(run):
    said = run("analyse_a_model")
    ((r2, chance),) = re.findall(r"R² of P: ([\d.]+), chance gives ([\d.]+)", said)
    assert float(r2) > 0.99 > 0.5 > float(chance)


def test_fine_tune(run):
    kernels, nothing = numbers(r"([\d.]+) % right", run("fine_tune", "--steps", 110))
    assert kernels > 90
    assert nothing < 65


def test_language_model(run):
    said = run("language_model", "--steps", 4, "--positions", "tisa,alibi")
    losses = numbers(r"tokens ([\d.]+)", said)
    assert len(losses) == 4
    # Sixteen tokens: chance is ln 16 = 2.77.
    assert all(loss < 3.5 for loss in losses)


def test_long_sequences(run):
    said = run("long_sequences", "--length", 700)
    assert "700 tokens" in said
    differences = numbers(r"plain formula ([\d.e-]+)", said)
    assert len(differences) == 2
    assert max(differences) < 1e-5


def test_read_the_curves(run):
    said = run("read_the_curves")
    assert "most at k = -1" in said
    assert "most at k = +0" in said
