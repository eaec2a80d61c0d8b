"""One view for runs and sweeps: lines in a file, a picture in a terminal, or nothing."""

import io

from rich.console import Console

from tisa_lab.view import SHOWN, Lines, Live, Silent, spoken, view_for


def test_lines_are_for_files():
    said = io.StringIO()
    with Lines(said, seconds=1000.0) as view:
        view.begin(100, 10)
        for done in range(11, 101):
            view.step(done, f"loss {done}")
        view.say("written [here]")
    lines = said.getvalue().splitlines()
    # The first, the last, and what was said; never a line for every step.
    assert lines[0].startswith("step 11 of 100, loss 11, ")
    assert lines[1] == "step 100 of 100, loss 100, 0.0 s left"
    assert lines[2:] == ["written [here]"]
    view.step(100)  # Nothing told: a sweep says its own lines.
    assert said.getvalue().count("\n") == 3


def test_a_picture_is_for_terminals():
    said = io.StringIO()
    console = Console(file=said, width=60, force_terminal=True)
    with Live(console) as view:
        view.begin(40, unit="cells")
        for number in range(SHOWN + 2):
            view.started(f"cell [{number}]")
        view.inside("step 3 of 9")
        view.step(1, left=75.0)
        view.ended("cell [0]")
        view.say("failed: " + 20 * "a long line ", wrong=True)
        seen = Console(file=io.StringIO(), width=60, record=True)
        seen.print(view.picture())
    text = seen.export_text()
    assert "cell [1]" in text
    assert "and 1 beside them" in text
    assert "1 of 40 cells done, about 1 min 15 s left" in text
    assert 20 * "a long line " in said.getvalue()


def test_silence_and_words(capsys):
    with view_for(shown=False) as view:
        assert type(view) is Silent
        view.begin(2)
        view.step(1, "loss 2")
        view.say("word")
    assert type(view_for()) is Lines
    assert capsys.readouterr().err == ""
    assert [spoken(s) for s in (3.14, 59.4, 61)] == ["3.1 s", "59 s", "1 min 1 s"]
    assert spoken(7260) == "2 h 1 min"
