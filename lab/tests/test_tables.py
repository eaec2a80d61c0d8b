"""Every way of writing a table, with what a cell may hold."""

from tisa_lab.tables import comma_separated, latex, markdown

HEADER = ["", "CoLA", "a|b"]
ROWS = [["S = 5", "31.0", "50 %"], ["Δ_x", "missing", "–"]]


def test_markdown_has_its_columns_and_no_others():
    made = markdown(HEADER, ROWS, "lrc").splitlines()
    assert made == [
        "| | CoLA | a\\|b |",
        "|---|---:|:---:|",
        "| S = 5 | 31.0 | 50 % |",
        "| Δ_x | missing | – |",
    ]
    assert markdown(HEADER, []).splitlines()[1] == "|---|---|---|"


def test_latex_sees_no_commands_in_a_cell():
    made = latex(HEADER, ROWS, "50 % of #1").splitlines()
    assert r"\caption{50 \% of \#1}" in made
    assert r"\begin{tabular}{lcc}" in made
    assert r"$\Delta$\_x & missing & -- \\" in made
    assert made.count(r"\midrule") == 1


def test_numbers_and_nothing_in_csv():
    rows = [{"name": "a, b", "score": 0.5, "seeds": 3}, {"name": "c", "score": None, "seeds": 0}]
    assert comma_separated(rows) == 'name,score,seeds\n"a, b",0.5000,3\nc,,0\n'
    assert comma_separated([]) == ""
