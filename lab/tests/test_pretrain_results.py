"""The tables of pretraining in docs/results.md are those of the records."""

import json
from pathlib import Path

from tisa_lab.extrapolation.tables import markdown as far_tables
from tisa_lab.pretrain.summary import gate, groups_of, label_of, markdown, read_records

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs/records/2026-11-16-pretrain"
WHERE = {"tisa": "one for each layer", "tisa layers=shared": "one for all layers",
         "tisa layers=first": "in the first layer only", "none": "none"}  # fmt: skip


def shown(name):
    page = (ROOT / "docs/results.md").read_text()
    return page.split(f"<!-- {name} -->\n")[1].split("<!-- end")[0]


def test_perplexities():
    for folder in ("causal", "causal-5e-4"):
        record = json.loads((FOLDER / folder / "extrapolation.json").read_text())
        made = far_tables(record)
        assert made == (FOLDER / folder / "extrapolation.md").read_text()
        if folder == "causal":
            assert shown("far") in made
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    found = {
        run["label"]: [row.get("perplexity") for row in run["rows"] if row["mode"] == "whole"]
        for run in record["runs"]
    }
    (line,) = [line for line in shown("far").splitlines() if line.startswith("| near-far")]
    trained, *_, eight_times, _, _ = (cell.split(" (")[0] for cell in line.split(" | ")[1:])
    lower = round(100 - 100 * float(eight_times) / float(trained))
    assert f"its perplexity is {lower} % below that at the training length" in page
    trained, twice, four, _, last = found["floater stride=16"]
    assert last is None
    assert f"{trained:.1f} at 512 with half the learning rate" in page
    assert f"TISA has {found['tisa'][0]:.1f} at that rate; {twice:.1f} at 1,024, {four:.1f}" in page


def test_losses_of_encoders():
    # Step times in these records are of runs that shared the GPU: those shown were measured alone.
    steps = json.loads((FOLDER / "throughput-384x4-131072.json").read_text())["rows"]
    made = markdown(groups_of(read_records(FOLDER / "encoder-wide/records.jsonl"))).splitlines()
    told = [line.rsplit(" | ", 1)[0] for line in made]
    for number, line in enumerate(told[2:], start=2):
        name = line.removeprefix("| ").split(" ")[0]
        told[number] += f" | {steps[name]['ratio_to_absolute']:.2f} |"
    told[:2] = [f"{told[0]} | step ÷ absolute's |", "|---" * 7 + "|"]
    assert shown("encoder").splitlines() == told
    found = groups_of(
        [
            r
            for name in ("where", "encoder")
            for r in read_records(FOLDER / f"{name}-wide/records.jsonl")
        ]
    )
    told = [g for g in found if g.label in WHERE]
    assert shown("where") == "".join(
        [
            "| scores | validation loss | seeds (max − min) | positional parameters |\n",
            "|---" * 4 + "|\n",
        ]
        + [
            f"| {WHERE[g.label]} | {g.mean:.4f} | {len(g.records)} ({g.spread:.4f}) "
            f"| {g.records[0]['parameters']['positional']:,} |\n"
            for g in told
        ]
    )


def test_what_is_said_of_the_gate_and_of_the_block():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    for name, words in (("wide", "40.7 times"), ("85m", "2.6 times"), ("66m", "3.6 times")):
        found = gate(groups_of(read_records(FOLDER / f"encoder-{name}/records.jsonl")))
        assert f"{found['ratio']:.1f} times" == words
        assert words in page
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
    tables = {
        (r["config"]["position"], r["config"]["seed"]): {
            e["step"]: f"{e['position']['r2_off_diagonal']:.2f}" for e in r["evaluations"]
        }
        for r in read_records(FOLDER / "encoder-wide/records.jsonl")
        if r["config"]["position"] in ("absolute", "tupe-a")
    }
    first, second = tables["absolute", 0], tables["absolute", 1]
    assert first[200] == second[200] == "0.02"
    assert f"rises to {second[600]} and {first[600]} by step 600" in page
    assert f"hardly further: {second[2000]} and {first[2000]} at the end" in page
    assert {tables["tupe-a", seed][2000] for seed in (0, 1)} == {"0.75"}
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


def test_the_rows_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    found = {g.label: g for g in groups_of(read_records(FOLDER / "encoder-wide/records.jsonl"))}
    names = {"t5": "T5", "rotary": "rotary", "alibi": "ALiBi", "absolute": "absolute",
             "tisa": "TISA", "near-far": "our `NearFar`", "none": "none"}  # fmt: skip
    (row,) = [line for line in readme.splitlines() if "masked-token loss" in line]
    for label, name in names.items():
        assert f"{name} {found[label].mean:.2f}" in row
    names["kerple-log"] = "KERPLE"
    (row,) = [line for line in readme.splitlines() if "read at 8,192: perplexity" in line]
    far = {line.split(" | ")[0][2:]: line.split(" | ") for line in shown("far").splitlines()[2:]}
    for label in ("t5", "rotary", "alibi", "kerple-log", "tisa", "near-far"):
        _, trained, *_, longest, _ = (cell.split(" (")[0] for cell in far[label])
        assert f"{names[label].removeprefix('our ')} {longest} ({trained})" in row
