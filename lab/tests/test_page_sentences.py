"""Every number in a sentence of the laboratory's pages is the record's."""

import copy
import json
import re
import statistics
from collections import Counter
from math import exp
from pathlib import Path

import pytest

from page_numbers import needs_node, other, scripts_tell, told, untraced
from tisa_lab.criteria import report as criteria
from tisa_lab.demo import page as demo
from tisa_lab.extrapolation import page as extrapolation

RECORDS = Path(__file__).parents[2] / "docs/records"
MAPS = dict.fromkeys(("table", "fit", "chance"), "")
DEMO = ["Table 1", "table1", "ACL 2021", "place 7 comes after place 6", "at 1 the model"]
# What is counted on the page itself is checked below.
LITERALS = {
    "criteria": ["Table 1"],
    "extrapolation": ["with 13 ways", "12 times"],
    **dict.fromkeys(("demo", "demo, small", "demo, folder", "demo, quick"), DEMO),
}


def recorded(kind):
    """Return what makes a page, and a record that is committed."""
    if kind == "criteria":
        make, path = criteria.page_of, "2026-11-19-table1/criteria.json"
    elif kind == "extrapolation":
        make, path = extrapolation.page_of, "2026-11-16-pretrain/causal/extrapolation.json"
    else:
        make, path = lambda record: demo.page_of(record, MAPS), "2026-11-19-demo.json"
    record = json.loads((RECORDS / path).read_text())
    if kind == "demo, small":
        record["model"] |= {"kind": "small", "why": "offline since 1999", "steps": 1200}
    if kind == "demo, folder":
        record["model"]["kind"] = "folder"
    if kind == "demo, quick":
        record["settings"]["quick"] = True
    return make, record


@pytest.mark.parametrize("kind", LITERALS)
def test_every_number_in_a_sentence_follows_the_record(kind):
    make, record = recorded(kind)
    before, after = told(make(record)), told(make(other(record)))
    found = untraced(before, after, LITERALS[kind])
    if kind == "criteria":
        assert {text for _, text in found} == {"6 of 9", "8 of 9", "9 of 9"}
    else:
        # The links to the chapters, and a list's length.
        counted = [*"12345678", str(len(record["removed"]["pairs"]))] if "removed" in record else []
        # A phrase at its first place, and attention that stays.
        still = [("0", "0 %")] * 4 if counted else []
        assert found == still + [(number, number) for number in counted]


@pytest.mark.parametrize("kind", ["criteria", "extrapolation", "demo"])
def test_a_number_that_stands_in_the_template_is_found(kind):
    make, record = recorded(kind)
    before, after = ([*told(make(r)), "Of 72 heads 34 care."] for r in (record, other(record)))
    assert {n for n, text in untraced(before, after, []) if "heads" in text} == {"72", "34"}


def test_what_the_page_of_criteria_counts_is_so():
    make, record = recorded("criteria")
    claimed = [
        (criterion, cell["mark"] == cell["paper"])
        for row in record["rows"]
        for criterion, cell in row["cells"].items()
        if cell["paper"] is not None
    ]
    agree, of = Counter(c for c, same in claimed if same), Counter(c for c, _ in claimed)
    total = record["agreement"]
    assert (total["agree"], total["of"], total["by criterion"]) == (
        agree.total(), of.total(), dict(agree),
    )  # fmt: skip
    text = told(make(record))
    for criterion in of:
        assert text[text.index(criterion) - 1] == f"{agree[criterion]} of {of[criterion]}"
    used = {tried["criterion"]: tried for tried in record["sensitivity"] if tried["used"]}
    assert {c: (t["agree"], t["of"]) for c, t in used.items()} == {c: (agree[c], of[c]) for c in of}


def test_what_the_page_of_extrapolation_counts_is_so():
    make, record = recorded("extrapolation")
    record["runs"] = record["runs"][:-1]
    ways = {run["label"] for run in record["runs"]}
    refused = {
        (run["label"], row["length"], row["refused"])
        for run in record["runs"]
        for row in run["rows"]
        if "refused" in row
    }
    text = " ".join(told(make(record)))
    assert f"with {len(ways)} ways of telling positions" in text
    assert f"{len(refused)} times, and why" in text
    assert "documents," in text
    record["documents"] = 1
    assert " 1 document, " in " ".join(told(make(record)))


def test_what_the_demo_says_of_its_curves_and_shares_is_so():
    _, record = recorded("demo")
    curves, model, kernels = record["curves"], record["model"], record["kernels"]
    caring = [head for head in curves["heads"] if head["spread"] >= curves["threshold"]]
    for head in caring:
        assert head["values"][head["peak"] + curves["reach"]] == max(head["values"])
        spread = max(head["values"]) - min(head["values"])
        assert head["spread"] == pytest.approx(spread, abs=0.0011)
    peaks = [head["peak"] for head in caring]
    assert curves["caring"] == len(caring)
    assert curves["count"] == len(curves["heads"]) == model["layers"] * model["heads"]
    found = [curves[name] for name in ("before", "after", "near")]
    assert found == [peaks.count(-1), peaks.count(1), sum(-3 <= peak <= 3 for peak in peaks)]
    assert kernels["numbers"] == 3 * kernels["kernels"] * curves["count"]
    assert kernels["replaced"] == record["positions"]["positions"] * model["width"]
    assert kernels["vectors"] == 3 * model["width"]
    assert len(record["removed"]["pairs"]) == len(record["removed"]["zeroed"]["alike"])
    removed, whole = (record["removed"][name]["closeness"] for name in ("zeroed", "original"))
    for name, share in record["given_back"].items():
        assert share == pytest.approx((record[name]["closeness"] - removed) / (whole - removed))
    assert record["about"]["seconds"] == pytest.approx(sum(record["seconds"].values()))
    marks = [c for row in record["table1"]["rows"] for c in row["cells"].values()]
    claimed = [c["mark"] == c["paper"] for c in marks if c["paper"] is not None]
    assert (record["table1"]["agree"], record["table1"]["of"]) == (sum(claimed), len(claimed))


@pytest.mark.parametrize(
    ("above", "said"), [(0.21, "a good part"), (0.19, "little more than chance"), (-0.1, "little")]
)
def test_the_verdict_on_a_table_is_that_of_its_numbers(above, said):
    make, record = recorded("demo")
    record["positions"] |= {"off_diagonal": 0.3 + above, "off_diagonal_null": 0.3}
    assert said in " ".join(told(make(record)))


def test_what_distilling_brought_is_what_was_measured():
    make, record = recorded("demo")
    sentences = {
        (1, 1, 1): "In this run the vectors are closer, more word orders are recognised and more "
        "pairs are told apart. Of what",
        (1, 0, 0): "In this run the vectors are closer. Of what",
        (-1, 1, 0): "more word orders are recognised. But the vectors are less close. Of what",
        (0, -1, -1): "it brought nothing more. But fewer word orders are recognised and fewer "
        "pairs are told apart. Of what",
    }
    names = ("closeness", "orders", "pairs")
    for signs, sentence in sentences.items():
        changed = copy.deepcopy(record)
        for name, sign in zip(names, signs, strict=True):
            changed["kernels"][name], changed["distilled"][name] = 0.5, 0.5 + 0.1 * sign
        assert sentence in " ".join(told(make(changed)))
    record["given_back"] = {"kernels": None, "distilled": None}
    assert "Of what removing" not in " ".join(told(make(record)))


@needs_node
def test_scripts_tell_the_numbers_of_the_record(tmp_path):
    """Every head that can be chosen, and the point of a chart that is pointed at."""
    make, record = recorded("demo")
    heads = record["curves"]["heads"]
    click = [f"document.querySelectorAll('.head')[{i}].listeners.click[0]()" for i in (0, 17, 71)]
    point = "happens('pointermove', { clientX: 60, clientY: 30 })"
    *_, first, second, third, pointed = scripts_tell(make(record), tmp_path, *click, point)
    for texts, head in zip((first, second, third), (heads[0], heads[17], heads[71]), strict=True):
        name, peak = f"Layer {head['layer']}, head {head['head']}", head["peak"]
        where = f"{peak:+d}".replace("-", "−").replace("+0", "0")
        assert f"{name}: largest at k = {where}" in texts
        assert head["values"][peak + record["curves"]["reach"]] == max(head["values"])
    said = {
        f"{row['method']}, tokens {length}: {100 * share:.0f} %"
        for row in record["race"]["rows"]
        for length, share in zip(record["race"]["lengths"], row["accuracy"].values(), strict=True)
        if share is not None
    }
    assert len(said & set(pointed)) == len(record["settings"]["race_tasks"])

    make, record = recorded("extrapolation")
    _, pointed = scripts_tell(make(record), tmp_path, point)
    losses = {}
    for run in record["runs"]:
        for row in run["rows"]:
            if row.get("loss") is not None:
                losses.setdefault((run["label"], row["length"]), set()).add(
                    (row["mode"], row["loss"])
                )
    for text in (text for text in pointed if ", tokens " in text):
        name, length, value = re.fullmatch(r"(.*), tokens ([\d.]+): ([\d.,]+)", text).groups()
        means = {
            statistics.fmean(loss for m, loss in losses[name, int(float(length))] if m == mode)
            for mode, _ in losses[name, int(float(length))]
        }
        assert any(float(value) == pytest.approx(exp(mean), rel=1e-2) for mean in means), text
    assert sum(", tokens " in text for text in pointed) == 2
