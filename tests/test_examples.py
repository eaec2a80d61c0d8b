"""Every example, run small as a user would, and whether it shows what it says."""

import json
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
    kernels, nothing = numbers(r"token by token, [\w ]+: ([\d.]+)", said)
    # Its heads look at fixed offsets: the kernels bring back what is lost without them.
    assert 1 > kernels > 0.9
    assert nothing < kernels - 0.1
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
    said = run("language_model", "--steps", 90, "--positions", "tisa,none")
    at_48, at_384 = (
        numbers(r"at 48 tokens ([\d.]+)", said),
        numbers(r"at 384 tokens ([\d.]+)", said),
    )
    # Sixteen tokens: chance is ln 16 = 2.77. Which stood seven places before, only positions tell.
    for with_kernels, without in (at_48, at_384):
        assert with_kernels < without - 0.2
        assert without > 2.3


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


def test_the_notebook_runs_top_to_bottom(tmp_path, monkeypatch, capsys):
    """Its code cells in one namespace, as a notebook program runs them; what is saved came out."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the notebook draws")
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("Agg")
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text("utf-8"))
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"display_data", "stream"}
    drawn = [output["data"] for output in outputs if output["output_type"] == "display_data"]
    assert all(len(data["image/png"]) > 10_000 for data in drawn)
    # Nothing of the machine that it ran on.
    said = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    assert not re.search(r"/\w+/", "".join(said))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"first_hour.ipynb, cell {number}", "exec"), names)
    figures = len(pyplot.get_fignums())
    pyplot.close("all")
    assert figures == len(drawn) == 3
    assert names["right"] > 0.9
    assert -3 in names["peaks"]
    assert names["closeness"]["with kernels"] > names["closeness"]["without"] + 0.1
    # The words of what was printed; its numbers' last digits are the machine's.
    now = capsys.readouterr().out
    assert "peaks: [-1, 2]" in now
    assert re.sub(r"[\d.e-]+", "", now) == re.sub(r"[\d.e-]+", "", "".join(said))
