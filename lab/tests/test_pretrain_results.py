"""The tables of pretraining in docs/results.md are those of the records."""

import importlib.util
import json
from pathlib import Path

from tisa_lab.extrapolation.report import markdown as far_tables
from tisa_lab.extrapolation.report import mean_loss
from tisa_lab.pretrain.report import gate, groups_of, label_of, read_records

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs/records/2026-11-16-pretrain"

source = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
tables = importlib.util.module_from_spec(source)
source.loader.exec_module(tables)


def words_of(page):
    return " ".join((ROOT / page).read_text().split())


def per_cent(value, digits=1):
    return f"{value:+.{digits}f}".replace("-", "−")


def test_tables_are_those_of_the_records():
    page = (ROOT / "docs/results.md").read_text()
    assert tables.page(page) == page, "run: python docs/tables.py"


def test_perplexities():
    for folder in ("causal", "causal-5e-4"):
        record = json.loads((FOLDER / folder / "extrapolation.json").read_text())
        assert far_tables(record) == (FOLDER / folder / "extrapolation.md").read_text()
    found = {
        run["label"]: [row.get("perplexity") for row in run["rows"] if row["mode"] == "whole"]
        for run in record["runs"]
    }
    trained, twice, four, _, last = found["floater stride=16"]
    assert last is None
    page = words_of("docs/results.md")
    assert f"{trained:.1f} at 512 with half the learning rate" in page
    assert f"TISA has {found['tisa'][0]:.1f} at that rate; {twice:.1f} at 1,024, {four:.1f}" in page


def test_what_is_said_of_sliding_windows():
    page = words_of("docs/results.md")
    change = {name: f"{tables.far_change(name):.1f} %" for name in ("tisa", "t5", "near-far")}
    assert f"perplexity rises by {change['tisa']} and {change['t5']}" in page
    assert change["near-far"] == f"{tables.far_change('kerple-log'):.1f} %" == "-2.5 %"
    assert "both fall by 2.5 %" in page
    assert f"gains nothing ({per_cent(tables.far_change('alibi'))} %)" in page
    assert f"past 1,024 it loses {tables.far_change('tisa-v2'):.1f} %" in page
    assert f"and worse: {per_cent(tables.far_change('shaw'))} %" in page
    index = words_of("docs/idea.md")
    assert "has a perplexity 2.5 % below that with 1,024" in index
    assert f"TISA's is {change['tisa']} above" in index
    # What was told before, and why it was wrong.
    rows = tables.by_method(tables.FAR, "whole")
    names = {"near-far": "near-far", "kerple-log": "KERPLE", "alibi": "ALiBi",
             "tisa-v2": "TISA v2", "t5": "T5", "tisa": "TISA"}  # fmt: skip
    told = []
    for label, name in names.items():
        first, last = (mean_loss(rows[label][length]) for length in (512, 8192))
        told.append(f"{name} {per_cent(100 * tables.math.expm1(last - first), 0)} %")
    assert f"from 512 to 8,192 ({', '.join(told)})" in page


def test_what_is_said_of_rates():
    page, named = words_of("docs/results.md"), {curve.label: curve for curve in tables.RATES}

    def widths(*labels):
        ranges = [named[label].within(0.1) for label in labels]
        return [f"{high / low:.1f}" for low, high, _ in ranges]

    decay = widths("near-far", *(n for n in named if "layers=each" in n), "tisa-v2", "alibi")
    assert f"over a factor of {min(decay)} to {max(decay)} in the rate" in page
    bare = widths("tisa", "t5", "tupe-a", "none", "absolute")
    assert f"over a factor of {min(bare)} to {max(bare)}, and rotary" in page
    assert f"rotary positions over {widths('rotary')[0]}" in page
    ours, other = named["near-far"], named["kerple-log layers=each"]
    behind = other.perplexity(other.best) / ours.perplexity(ours.best) - 1
    assert f"KERPLE log is {100 * behind:.1f} % behind" in page
    pairs = zip(ours.losses(ours.best), other.losses(other.best), strict=True)
    assert all(one < another for one, another in pairs)
    three = [named[n].perplexity(named[n].best) for n in ("tisa", "t5", "rotary")]
    assert f"lie within {100 * (max(three) / min(three) - 1):.1f} % of each other" in page


def test_what_is_said_of_the_review():
    """Its numbers are those of its record, and marked as what they are."""
    page, review = words_of("docs/results.md"), tables.REVIEW
    assert review["commit"] in page
    own = {g.label: g.mean for g in tables.encoders("encoder-wide")}
    best, high = (review["encoders"]["rates"][rate] for rate in ("2e-3", "4e-3"))
    assert best["tisa"] == best["t5"]
    assert f"TISA's lead over T5 ({own['t5'] - own['tisa']:.3f} at 1e-3) is gone" in page
    leads = own["t5"] - own["near-far"], best["t5"] - best["near-far"]
    assert f"near-far's shrinks from {leads[0]:.3f} to {leads[1]:.3f}" in page
    assert f"near-far ({high['near-far']}) and rotary positions ({high['rotary']}) do not" in page
    assert f"{own['absolute']:.3f}" == f"{review['encoders']['best at 1e-3']['absolute']:.3f}"
    names = {"near-far": "near-far", "kerple-log": "KERPLE", "tisa": "TISA", "t5": "T5",
             "rotary": "rotary"}  # fmt: skip
    for label, name in names.items():
        found = review["decoders"]["perplexity"][label]
        assert f"{name} {found['least']}–{found['largest']}" in page
    recall = review["recall"]["accuracy"]
    least, largest = recall["tisa, t5, kerple"]
    assert f"TISA, T5 and KERPLE still find {least} to {largest} of the answers" in page
    assert f"(their plateau is {review['recall']['plateau']})" in page
    assert "near-far {} to {}".format(*recall["near-far"]) in page
    assert f"ALiBi and TISA v2 {recall['alibi, tisa-v2'][0]}." in page
    assert "**one seed**" in page
    assert "masked-token loss, each at its best rate (a review's runs, one seed)" in page


def test_what_is_said_of_the_gate_and_of_the_block():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    for name, words in (("wide", "40.7 times"), ("85m", "2.6 times"), ("66m", "3.6 times")):
        found = gate(groups_of(read_records(FOLDER / f"encoder-{name}/records.jsonl")))
        assert f"{found['ratio']:.1f} times" == words
        assert words in page
    losses = {g.label: g.losses for g in tables.encoders("causal")}
    assert losses["absolute"] > losses["none"], "the decoders fail it, with the wrong sign"
    (absolute,), (none,) = losses["absolute"], losses["none"]
    assert f"(losses {absolute:.3f} and {none:.3f}, one seed each): the wrong sign" in page
    ends = {
        label_of(r["config"]): r["evaluations"][-1]
        for r in read_records(FOLDER / "schedule-wide/records.jsonl")
    }
    schedule, control = ends["absolute 128→512"], ends["absolute"]
    assert (
        f"{schedule['position']['block_squares']:.0%}".replace("%", " %") + " of all squares"
        in page
    )
    assert f"({control['position']['block_squares']:.0%}".replace("%", " %") + " in a model" in page
    assert f"rows of 512: {schedule['loss']:.2f}, and {control['loss']:.2f} for" in page


def test_what_is_said_of_narrow_embeddings():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    wide, narrow = (
        groups_of(read_records(FOLDER / f"encoder-{name}/records.jsonl"))
        for name in ("wide", "85m")
    )
    assert {g.label for g in wide[:3]} == {g.label for g in narrow[:3]}
    names = ("near-far", "TISA", "TUPE", "T5", "rotary", "Shaw", "ALiBi")
    told = [f"{name} {g.mean:.2f}" for name, g in zip(names, narrow, strict=False)]
    assert f"the same three were at the top: {', '.join(told)}." in page
    tries = json.loads((FOLDER / "plateau.json").read_text())["tries"]
    other = [t for t in tries if t["name"] not in ("base", "none")]
    assert f"Of {['five', 'six', 'seven'][len(other) - 5]} other recipes" in page


def test_what_is_said_of_floater_of_tables_and_of_speed():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    half, quarter = (
        {
            g.label: f"{g.mean:.2f}"
            for g in groups_of(read_records(FOLDER / f"{name}/records.jsonl"))
        }
        for name in ("floater-5e-4", "floater-2.5e-4")
    )
    flow = "floater stride=4"
    assert f"ends at {half[flow]}, where absolute positions have {half['absolute']}" in page
    assert f"and TISA {half['tisa']} (" in page
    assert f"a quarter {quarter[flow]}, {quarter['absolute']} and {quarter['tisa']} (" in page
    said = (FOLDER / "floater-1e-3.txt").read_text()
    for steps in (649, 702):
        assert f"nan at step {steps};" in said
        assert f"after {steps}" in page
    squares = {
        (r["config"]["position"], r["config"]["seed"]): {
            e["step"]: f"{e['position']['r2_off_diagonal']:.2f}" for e in r["evaluations"]
        }
        for r in read_records(FOLDER / "encoder-wide/records.jsonl")
        if r["config"]["position"] in ("absolute", "tupe-a")
    }
    first, second = squares["absolute", 0], squares["absolute", 1]
    assert first[200] == second[200] == "0.02"
    assert f"rises to {second[600]} and {first[600]} by step 600" in page
    assert f"hardly further: {second[2000]} and {first[2000]} at the end" in page
    assert {squares["tupe-a", seed][2000] for seed in (0, 1)} == {"0.75"}
    rows = json.loads((FOLDER / "throughput-512x4.json").read_text())["rows"]
    told = [f"{rows[name]['p50_ms']:.2f}" for name in ("tisa", "absolute")]
    assert f"({told[0]} and {told[1]} ms, " in page
    assert f"takes {rows['tisa']['ratio_to_absolute']:.2f} times as long" in page
    for tokens, names in (
        (131072, {"alibi": "ALiBi {}", "tisa": "near-far and TISA {}", "kerple-log": "KERPLE {}",
                  "tisa-v2": "TISA v2 {}", "t5": "T5 {} times", "tupe-a": "TUPE {}",
                  "synthesizer-random": "synthesizers {}", "shaw": "Shaw {}.",
                  "floater": "(stride 4), {}", "rotary": "Rotary positions, {},"}),
        (32768, {"shaw": "but Shaw ({})", "floater": "FLOATER ({}) wait"}),
    ):  # fmt: skip
        rows = json.loads((FOLDER / f"throughput-384x4-{tokens}.json").read_text())["rows"]
        for name, words in names.items():
            assert words.format(f"{rows[name]['ratio_to_absolute']:.2f}") in page
        others = [rows[name]["p50_ms"] for name in rows if name not in ("shaw", "floater")]
        if tokens == 32768:
            assert f"{min(others):.0f} to {max(others):.0f} ms a step" in page


def test_the_rows_beside_the_papers():
    section = (ROOT / "docs/results.md").read_text().split("## What came out")[1].split("\n## ")[0]
    names = {"t5": "T5", "rotary": "rotary", "tupe-a": "TUPE", "absolute": "absolute",
             "tisa": "TISA", "near-far": "our `NearFar`", "alibi": "ALiBi",
             "kerple-log": "KERPLE"}  # fmt: skip
    (row,) = [line for line in section.splitlines() if "masked-token loss" in line]
    for label, loss, *_ in tables.rows_of(tables.rates())[1:]:
        assert f"{names[label]} {loss}" in row
    (row,) = [line for line in section.splitlines() if "to 8,192 tokens of context" in line]
    far = {line[0]: [cell.split(" (")[0] for cell in line] for line in tables.rows_of(tables.far())}
    for label in ("t5", "rotary", "alibi", "kerple-log", "tisa", "near-far"):
        assert f"{names[label].removeprefix('our ')} {far[label][2]} → {far[label][5]}" in row
    assert round(tables.far_change("tisa")) == 10
    assert "TISA's perplexity rises by 10 % far away" in words_of("README.md")
