"""What the scripts of the pages tell: numbers of the data, evaluated by Node without a browser."""

import inspect
import re
from math import exp

import torch

from page_numbers import needs_node, other, scripts_tell, untraced
from tisa.analysis.heads import SENSITIVE
from tisa.analysis.page.packing import REACH, colours, pack
from tisa.analysis.resampling import bootstrap_interval
from tisa.pages import page

pytestmark = needs_node
HEADS = 2


def shown(x, digits=3):
    """Return a number as `number` in curves.js writes it; none here is tiny or large."""
    size = abs(x)
    digits = min(digits, 1 if size >= 100 else 2 if size >= 10 else digits)
    return f"{x:.{digits}f}".replace("-", "−")


def some(generator, *shape):
    size = 1 + 0.7 * generator.initial_seed()
    return (torch.rand(shape, generator=generator) * 0.9 + 0.05) * size


def invariance(generator):
    names = ("r2", "null", "off_diagonal", "off_diagonal_null")
    values = {name: float(some(generator)) for name in names}
    return values | {
        name: some(generator, 2).tolist() for name in ("interval", "off_diagonal_interval")
    }


def fits(generator, reach):
    """Return kernels of every size up to 3, as an analysis has them."""
    of_size = {
        name: [some(generator, HEADS, size).tolist() for size in range(4)]
        for name in ("amplitude", "sharpness", "offset")
    }
    errors = {name: some(generator, 4, HEADS).tolist() for name in ("r2", "constant")}
    return of_size | errors | {"reach": reach}


def analysed(seed):
    """Return the data of a page about a model that never was, every number by chance."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 40 + 4 * seed, 8 + seed
    heads = [
        {name: some(generator, HEADS).tolist() for name in ("r2", "null", "strength")}
        | {"sensitive": [True, seed > 0]}
        for _ in range(2)
    ]
    numbers = {
        "name": "BERT", "family": "tiny", "heads": HEADS, "width": width, "leading_rows": 2,
        "toeplitz": {
            name: invariance(generator)
            for name in ("table", "centred", "without_first", "as_read")
        },
        "blocks": [{"start": 3, "end": 21} | invariance(generator)],
        "grid": {"rows": 5, "columns": 8} | invariance(generator),
        "input_shares": {"position": float(some(generator))},
        "pca": {
            "dimensions_90": 5, "frequencies": [1, 2, 3, 4, 5, 6, 7, 9],
            "step_r2": float(some(generator)), "still_r2": -float(some(generator)),
        },
        "layers_as_read": heads, "first_layer_raw": heads[0],
        "logit_terms": {"names": ["position", "word"], "shares": some(generator, 2, 2).tolist()},
        "curves": [{"r2": some(generator, 4, HEADS).tolist()}],
    }  # fmt: skip
    span = 2 * rows - 1
    layers = [
        {
            "label": f"layer {layer + 1}", "first": 1 - rows,
            "curves": pack(some(generator, HEADS, span)),
            "maps": pack(some(generator, HEADS, 16)), "near": fits(generator, 17 + seed),
        }
        for layer in range(2)
    ]  # fmt: skip
    layers[0]["whole"] = fits(generator, rows - 1)
    source = {"key": "read", "label": "weights", "note": "", "heads": HEADS, "layers": layers,
              "basis": pack(some(generator, rows, 4))}  # fmt: skip
    model = {
        "numbers": numbers, "sources": [source], "table": pack(some(generator, rows, width)),
        "components": pack(some(generator, rows, 8)),
    }  # fmt: skip
    return {"about": {"tisa": "0.1.0"}, "colours": colours(), "models": [model]}


def analysis_page(data):
    return page("tisa.analysis.page/page.html", data=data)


# One state for each choice that a reader has; then every map and chart is pointed at.
CHOICES = [
    "state.layer = 1; state.head = 1; state.kernels = 2; drawAll()",
    "state.layer = 0; state.reach = 512; state.kernels = 1; state.component = 1; drawAll()",
    "state.view = 3; drawAll(); happens('pointermove', { clientX: 200, clientY: 90 })",
]  # fmt: skip


def test_an_analysis_tells_its_numbers(tmp_path):
    data = analysed(0)
    numbers, (source,) = data["models"][0]["numbers"], data["models"][0]["sources"]
    first, second, whole, last = scripts_tell(analysis_page(data), tmp_path, *CHOICES)
    table, pca = numbers["toeplitz"]["table"], numbers["pca"]
    low, high = table["interval"]
    for sentence in (
        f"Toeplitz R² of P; chance alone gives {shown(table['null'])} at this shape",
        f"{shown(table['r2'])}, interval {shown(low)} to {shown(high)}, "
        f"chance {shown(table['null'])}",
        f"the same off the main diagonal; chance {shown(table['off_diagonal_null'])}",
        "1 of 2", "5 of 8", f"{100 * numbers['input_shares']['position']:.0f} %",
        "among positions 3–20", "by step on the 5 × 8 grid",
        "The table's first 2 rows are left out: no token ever gets them.",
        "mean R² of 3 kernels fitted to the first one's heads",
        shown(table["r2"]), shown(table["off_diagonal"]), f"BERT: P, R² {shown(table['r2'])}",
        f"One fixed rotation takes each row to the next with R² {shown(pca['step_r2'])}; "
        f"standing still would give {shown(pca['still_r2'])}.",
        "The table's path, first position dark, last bright. "
        "Strongest periods: 40.0 and 20.0 positions.",
    ):  # fmt: skip
        assert sentence in first, sentence
    assert "Strongest periods: 13.3 and 10.0 positions." in " ".join(whole)
    for texts, layer, head, fitted, size in (
        (second, 1, 1, source["layers"][1]["near"], 2),
        (whole, 0, 1, source["layers"][0]["whole"], 1),
    ):
        found = numbers["layers_as_read"][layer]
        assert (
            f"R² {shown(found['r2'][head])} (positions shuffled: {shown(found['null'][head])}) · "
            f"strength {shown(found['strength'][head])} logits: position-blind" in texts
        )
        share = shown(100 * fitted["r2"][size][head], 1)
        what = f"{size} kernel{'s explain' if size > 1 else ' explains'} {share} % of it"
        assert f"{what} up to distance {fitted['reach']}" in texts
        for other_head in range(HEADS):
            strength = shown(found["strength"][other_head])
            for mark in (":", ","):
                where = f"layer {layer + 1}, head {other_head + 1}{mark}"
                assert f"{where} strength {strength}" in texts
    terms = numbers["logit_terms"]["shares"]
    shares = [shown(50 * (terms[0][i] + terms[1][i]), 0) for i in (0, 1)]
    assert any(t.endswith(f": position {shares[0]} %, word {shares[1]} %") for t in first)
    assert any(t.startswith("position ") and ", dimension " in t for t in last)


# What a reader has chosen, and what has no other number in any model.
CHOSEN = re.compile(
    r"(layer|head|components?|Rows) \d( and \d|, \d)?|^\d and \d$|\d kernels? explain|"
    r"(position|key|query|row) \d+|dimension \d|\(offset 1\)|k = −?\d+|^[0-35]$|"
    r"90 %|mean R² of 3 kernels"
)


def test_every_number_that_an_analysis_tells_follows_the_data(tmp_path):
    data, changed = analysed(0), analysed(1)
    numbers = changed["models"][0]["numbers"]
    changed["models"][0]["numbers"] = other(numbers) | {"width": numbers["width"]}
    for before, after in zip(
        *(scripts_tell(analysis_page(d), tmp_path, *CHOICES) for d in (data, changed)), strict=True
    ):
        # The playground has kernels of its own.
        end = before.index("the word before")
        texts = ([CHOSEN.sub("", text) for text in told[:end]] for told in (before, after))
        assert untraced(*texts, []) == []


def test_what_the_page_of_an_analysis_says_of_itself_is_so():
    text = page("tisa.analysis.page/page.html", data=analysed(0))
    assert f"standard deviation of at least {SENSITIVE:g}" in text
    level = inspect.signature(bootstrap_interval).parameters["level"].default
    assert f"a {100 * level:g} % interval" in text
    assert f'<option value="{REACH}">±{REACH}</option>' in text
    assert "at most 512 × 512 squares" in text
    assert "blockMeans(table, n, d, 512)" in text


def heads_page(curves):
    """Return the page of a conversion with these curves."""
    found = [
        {"layer": 1, "head": i + 1, "peak": peak, "told": "", "values": values}
        for i, (values, peak) in enumerate(curves)
    ]
    about = {"positions": "keep", "start": "zero", "num_kernels": 1, "replaced_parameters": 0}
    return page(
        "tisa.hf/report.html", data={"curves": {"reach": 3, "heads": found, "first": 0}},
        name="x", tisa=about, count=1, before={}, after={},
    )  # fmt: skip


def test_the_level_of_0_stays_inside_the_picture_of_a_curve_below_it(tmp_path):
    broken = "querySelectorAll('line').find((line) => line.attributes['stroke-dasharray'])"
    shown = (
        "byId('chosen').textContent = [tile([-3, -1, -5]), byId('large')]"
        f".map((svg) => `at ${{svg.{broken}.attributes.y1}}`)"
    )
    _, texts = scripts_tell(
        heads_page([([-3.0, -1.0, -5.0, -2.0, -2.5, -2.0, -4.0], -2)]), tmp_path, shown
    )
    (said,) = (text for text in texts if text.startswith("at "))
    small, large = (float(part.removeprefix("at ")) for part in said.split(","))
    assert 0 < small < 34
    assert 20 <= large < 290


def test_a_chosen_head_is_told_as_it_is(tmp_path):
    curves = [
        ([0.0, -1.0, 0.5, 0.25, 0.0, 2.0, 0.1], 2),
        ([-3.0, -1.0, -5.0, -2.0, -2.5, -2.0, -4.0], -2),
        ([0.0] * 7, None),
    ]
    click = [f"document.querySelectorAll('.head')[{i}].listeners.click[0]()" for i in range(3)]
    point = "happens('pointermove', { clientX: 300, clientY: 0 })"
    _, *found = scripts_tell(heads_page(curves), tmp_path, *click, point)
    for i, places in enumerate(("k = +2", "k = −2", "several offsets")):
        assert f"Layer 1, head {i + 1}: largest at {places}" in found[i]
    assert "Layer 1, head 3: f(0) = 0.00" in found[3]
    # Where a word looks: the seventh of fourteen, scores beyond the ends held.
    values = curves[0][0]
    odds = [exp(values[max(0, min(6, j - 6 + 3))]) for j in range(14)]
    for j, word in ((4, "on"), (9, "other")):
        share = shown(100 * odds[j] / sum(odds), 1)
        assert any(t.startswith(f"{word}: {share} % of the attention of ") for t in found[0]), j
