"""Write the tables of results, reliability, fused, methods and the README anew from their records.

    python docs/tables.py

A table stands between `<!-- name -->` and `<!-- end of name -->`; a test calls `page` and compares.
"""

import json
import math
import re
from pathlib import Path

from tisa_lab.evaluation.rates import curves_of, gate
from tisa_lab.evaluation.report import answered, best_of_rates, by_rate
from tisa_lab.extrapolation.report import by_method, mean_loss
from tisa_lab.extrapolation.report import markdown as far_tables
from tisa_lab.long.readings import ONE, SEVERAL
from tisa_lab.long.report import table as long_table
from tisa_lab.pretrain.report import groups_of, markdown, read_records
from tisa_lab.tables import markdown as as_markdown

DOCS = Path(__file__).parent
BENCHMARKS = DOCS.parent / "benchmarks/results"
PRETRAIN = DOCS / "records/2026-11-16-pretrain"
FAULTS = json.loads((DOCS / "records/2026-11-19-faults/campaign.json").read_text())
REVIEW = json.loads((DOCS / "records/2026-11-16-review/rates-and-recall.json").read_text())
PROBE = json.loads((DOCS / "records/2026-11-16-review/t5-probe.json").read_text())
FUSED = [row for path in sorted(BENCHMARKS.glob("2026-11-19-fused-models-cpu*.json"))
         for row in json.loads(path.read_text())["rows"]]  # fmt: skip
# Of a T5-base encoder's step on a GPU: without dropout, with T5's own, and that of an hour before.
ON_GPU = {
    name: json.loads((BENCHMARKS / f"2026-11-19-fused-models-gpu-{name}.json").read_text())["rows"]
    for name in ("no-dropout", "dropout", "before")
}
OTHERS = json.loads((BENCHMARKS / "2026-11-19-fused-models-gpu-others.json").read_text())
CONVERTED = json.loads((BENCHMARKS / "2026-11-20-converted-gpu.json").read_text())["rows"]
WHOLE = json.loads((BENCHMARKS / "2026-11-19-whole-call-gpu.json").read_text())["rows"]
GATED = json.loads((BENCHMARKS / "2026-11-19-gate-gpu.json").read_text())["rows"]
MPNET = json.loads((BENCHMARKS / "2026-11-19-fused-mpnet-cpu.json").read_text())
CONFORMANCE = json.loads((DOCS / "records/2026-11-19-conformance.json").read_text())
SCORED = json.loads((DOCS / "records/2026-11-19-conversion-scoring.json").read_text())
EXTENDED = {
    name: json.loads((DOCS / f"records/2026-11-19-extend-{name}.json").read_text())["rows"]
    for name in ("minilm", "mpnet")
}
# Of a run that is in two of them the later one counts.
RATES = curves_of([
    record for path in sorted(DOCS.glob("records/*-rates/records.jsonl"))
    for record in read_records(path)
])  # fmt: skip
FAR = json.loads((PRETRAIN / "causal/extrapolation.json").read_text())
WHERE = {"tisa": "one for each layer", "tisa layers=shared": "one for all layers",
         "tisa layers=first": "in the first layer only", "none": "none"}  # fmt: skip

NAMES = {"minilm": "MiniLM", "mpnet": "MPNet"}

# Of the campaign of faults.
COMMANDS, STATES, FLIP = FAULTS["commands"], ("detected", "harmless", "lost"), "a flipped bit: "
SHARES = (
    "given back: folded",
    "given back: zeroed, S = 5",
    "given back: zeroed, S = 5, fitted",
    "given back: folded, S = 1, fitted",
    "given back: folded, S = 5, fitted",
    "given back: folded, S = 5, fitted, frozen",
    "given back: folded, S = 5, fitted, distilled 200",
    "given back from folded on: folded, S = 5, fitted",
    "given back from folded on: folded, S = 5, fitted, distilled 200",
)


def encoders(*folders):
    """Return the runs of encoders by method, the best first."""
    return groups_of([r for f in folders for r in read_records(PRETRAIN / f / "records.jsonl")])


def table(*lines):
    """Return lines of cells as Markdown, the first of them the heads of the columns."""
    first, *others = [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines]
    return "".join([first, "|---" * len(lines[0]) + "|\n", *others])


def rows_of(text):
    """Return the cells of a Markdown table, line by line, without the line of dashes."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def far_change(method):
    """Return how much the perplexity of sliding windows changes from 1,024 to 8,192, in per cent.

    The same tokens with at most 1,024 and at most 8,192 tokens before them; in neither does a token
    lose what stands before it to the edge of a window.
    """
    rows = by_method(FAR, "sliding")[method]
    first, last = (mean_loss(rows[length]) for length in (1024, 8192))
    return None if first is None or last is None else 100 * math.expm1(last - first)


def far():
    """Return the perplexities of sliding windows, as `tisa-lab extrapolate` writes them."""
    lines = rows_of(far_tables(FAR).split("## Sliding windows")[1])
    lines[0][-1] = "8,192 against 1,024"
    for line in lines[1:]:
        change = far_change(line[0])
        line[-1] = "–" if change is None else f"{change:+.1f} %".replace("-", "−")
    return table(*lines)


def shares():
    """Return what is given back of a loss, without MNLI-10k, where the model gains instead."""
    report = rows_of((DOCS / "records/2026-11-15-table3/table3.md").read_text())
    found = {line[0]: line for line in report}
    heads = next(line for line in report if "MNLI-10k" in line)
    lines = [heads, *(found[name] for name in SHARES)]
    column = heads.index("MNLI-10k")
    return table(*(line[:column] + line[column + 1 :] for line in lines))


def rates():
    """Return each encoder at the best learning rate that was tried."""
    own = {group.label: group for group in encoders("encoder-wide")}
    best = {name: (loss, "2e-3", "1, the review's") for name, loss in
            REVIEW["encoders"]["rates"]["2e-3"].items()}  # fmt: skip
    for name in REVIEW["encoders"]["best at 1e-3"]:
        best[name] = (own[name].mean, "1e-3", f"{len(own[name].records)}, ours")
    lines = [["method", "validation loss", "its rate", "seeds", "ours at 1e-3"]]
    for name, (loss, rate, seeds) in sorted(best.items(), key=lambda item: item[1][0]):
        lines.append([name, f"{loss:.3f}", rate, seeds, f"{own[name].mean:.4f}"])
    return table(*lines)


def decoder_rates():
    """Return each decoder's perplexity at each rate."""
    heads, rows = by_rate(RATES)
    return table(heads, *rows)


def decoder_best():
    """Return each decoder at its best rate, and the range of rates around it."""
    heads, rows = best_of_rates(RATES)
    return table(heads, *rows)


def decoder_gate():
    """Return in words whether decoders with absolute positions are apart from those with none."""
    return gate(RATES) + "\n"


def decoder_answers():
    """Return what the decoders were asked: nothing where no record has an answer."""
    return "".join(
        f"{title} (a method's best rate).\n\n{table(heads, *rows)}\n"
        for title, (heads, rows) in answered(RATES).items()
    )


def encoder():
    """Return all encoders at one learning rate, each step's time alone on the GPU beside it."""
    # Step times in these records are of runs that shared the GPU.
    steps = json.loads((PRETRAIN / "throughput-384x4-131072.json").read_text())["rows"]
    lines = rows_of(markdown(encoders("encoder-wide")))
    lines[0][-1] = "step ÷ absolute's"
    for line in lines[1:]:
        line[-1] = f"{steps[line[0].split(' ')[0]]['ratio_to_absolute']:.2f}"
    return table(*lines)


def where():
    """Return what scores in each layer, one for all or one in the first are worth."""
    heads = ["scores", "validation loss", "seeds (max − min)", "positional parameters"]
    return table(
        heads,
        *(
            [WHERE[g.label], f"{g.mean:.4f}", f"{len(g.records)} ({g.spread:.4f})",
             f"{g.records[0]['parameters']['positional']:,}"]
            for g in encoders("where-wide", "encoder-wide") if g.label in WHERE
        ),
    )  # fmt: skip


def outcomes(cells):
    """Return the sums of tables' cells: tried, detected, harmless, lost."""
    cells = list(cells)
    return [sum(cell.get(name, 0) for cell in cells) for name in ("tried", *STATES)]


def faults():
    """Return each fault of each command that writes: how often it was detected and was harmless."""
    found = {name: row for name, row in sorted(FAULTS["found"].items()) if set(row) & set(COMMANDS)}
    lines = [["command", *found, "tried", "lost"]]
    for command in COMMANDS:
        cells = [row.get(command, {}) for row in found.values()]
        tried, _, _, lost = outcomes(cells)
        shown = [f"{c.get('detected', 0)} + {c.get('harmless', 0)}" if c else "–" for c in cells]
        lines.append([command, *shown, f"{tried:,}", f"**{lost}**"])
    total = outcomes(cell for row in found.values() for cell in row.values())
    by_fault = [outcomes(row.values()) for row in found.values()]
    shown = [f"{detected} + {harmless}" for _, detected, harmless, _ in by_fault]
    return table(*lines, ["all", *shown, f"{total[0]:,}", f"**{total[3]}**"])


def calls():
    """Return how many calls each command makes that can fail."""
    names = ("write", "fsync", "rename", "read", "steps")
    heads = [
        "command",
        "writes",
        "fsyncs",
        "renames",
        "reads",
        "moments for a power cut",
        "all seen",
    ]
    rows = ([c, *(f"{n[name]:,}" for name in names), "yes" if n["all seen"] else "no"]
            for c, n in COMMANDS.items())  # fmt: skip
    return table(heads, *rows)


def flips():
    """Return what came of flipped bits, by the files and by the kind of byte."""
    found = {
        name: row for name, row in sorted(FAULTS["found"].items()) if not set(row) & set(COMMANDS)
    }
    reads = list(dict.fromkeys(read for row in found.values() for read in row))
    bits = [row for name, row in found.items() if name.startswith(FLIP)]
    lines = [["bits flipped in", "tried", *STATES]]
    for read in reads:
        lines.append([read, *outcomes(row[read] for row in bits if read in row)])
    for name, row in found.items():
        lines.append([f"*{name.removeprefix(FLIP)}*", *outcomes(row.values())])
    return table(*([str(line[0]), *map(str, line[1:])] for line in lines))


def beside_stock():
    """Yield of each case the best stock implementation's row, ours, and stock's least memory."""
    cases = [(r["model"], r["way"], r["length"], r["batch"]) for r in FUSED]
    for case in dict.fromkeys(cases):
        rows = [row for row, own in zip(FUSED, cases, strict=True) if own == case]
        (ours,) = (r for r in rows if r["contender"] == "fused")
        stock = [r for r in rows if r is not ours]
        yield min(stock, key=lambda r: r["ms"]), ours, min(r["MiB"] or math.inf for r in stock)


def fused():
    """Return how fast fused models are on a CPU, beside the best stock implementation of each."""
    lines = [["model", "what", "tokens x batch", "stock, ms", "fused, ms", "times as fast",
              "stock, MiB", "fused, MiB"]]  # fmt: skip
    for best, ours, least in beside_stock():
        lines.append([
            ours["model"], ours["way"], f"{ours['length']:,} x {ours['batch']}",
            f"{best['ms']:,.0f} ({best['contender']})", f"{ours['ms']:,.0f}",
            f"**{best['ms'] / ours['ms']:.2f}**",
            *(f"{x:,.0f}" if x and x < math.inf else "–" for x in (least, ours["MiB"])),
        ])  # fmt: skip
    return table(*lines)


def fused_steps():
    """Return the README's lines: how many times as fast a training step is, and its memory."""
    steps = {
        ours["length"]: f"{best['ms'] / ours['ms']:.2f} x, {ours['MiB'] / least:.2f} of the memory"
        for best, ours, least in beside_stock()
        if ours["model"].startswith("t5 of") and ours["way"] == "step"
    }
    beside = {
        "T5-base encoder, H200, bfloat16, beside `sdpa`, which transformers takes by itself":
            on_gpu("no-dropout", "sdpa"),
        "the same beside `eager`, the fastest stock attention": on_gpu("no-dropout", "eager"),
        "the same with T5's dropout, beside `eager`": on_gpu("before", "eager")
            | on_gpu("dropout", "eager"),
    }  # fmt: skip
    # Of the run an hour before, whose kernels were slower, what does not depend on that.
    beside["the same with T5's dropout, beside `eager`"].pop(2048)
    beside["the same with T5's dropout, beside `eager`"].pop(65536)
    lengths = sorted(steps.keys() | {n for row in beside.values() for n in row})
    return table(
        ["a training step", *(f"{n:,} tokens" for n in lengths)],
        ["T5 of 3 layers x 512, two CPU threads, float32, beside the best stock attention",
         *(steps.get(n, "") for n in lengths)],
        *([name, *(row.get(n, "") for n in lengths)] for name, row in beside.items()),
    )  # fmt: skip


def on_gpu(name, stock):
    """Return by length how many times as fast a fused step is as that stock attention's."""
    rows = {(row["length"], row["contender"]): row for row in ON_GPU[name]}
    found = {}
    for length, contender in rows:
        if contender != "fused":
            continue
        theirs, ours = rows[length, stock], rows[length, "fused"]
        found[length] = (
            f"{theirs['ms'] / ours['ms']:.2f} x, {ours['MiB'] / theirs['MiB']:.2f}"
            if "ms" in theirs else f"stock is {theirs['error']}"
        )  # fmt: skip
    return found


def fused_gpu():
    """Return what a T5-base encoder's step takes on an H200, in ms and GiB."""
    lines = [["dropout", "tokens x batch", "eager", "sdpa", "fused",
              "times as fast as eager", "as sdpa"]]  # fmt: skip
    for name, dropout in (("no-dropout", "0"), ("dropout", "0.1"), ("before", "0.1, earlier")):
        by_size = {}
        for row in ON_GPU[name]:
            by_size.setdefault((row["length"], row["batch"]), {})[row["contender"]] = row
        for (length, batch), found in by_size.items():
            ours = found["fused"]

            def told(row):
                if row is None:
                    return "–"
                return f"{row['ms']:,.1f} ms, {row['MiB'] / 1024:.1f} GiB" if "ms" in row else (
                    row["error"])  # fmt: skip

            faster = (
                f"**{row['ms'] / ours['ms']:.2f}**" if row and "ms" in row else "–"
                for row in (found.get("eager"), found.get("sdpa"))
            )
            lines.append([dropout, f"{length:,} x {batch}", told(found.get("eager")),
                          told(found.get("sdpa")), told(ours), *faster])  # fmt: skip
    return table(*lines)


def fused_others():
    """Return what other models and other work take on an H200, beside eager stock attention."""
    what = {"step": "training step", "forward": "forward pass", "first": "first token"}
    lines = [["model", "what", "tokens x batch", "eager", "sdpa", "fused",
              "times as fast as eager"]]  # fmt: skip
    for record in OTHERS:
        by_size = {}
        for row in record["rows"]:
            kind = row["model"], row["way"], row["length"], row["batch"]
            by_size.setdefault(kind, {})[row["contender"]] = row
        for (model, way, length, batch), found in by_size.items():
            told = [
                "–" if name not in found else
                f"{found[name]['ms']:,.1f} ms, {found[name]['MiB'] / 1024:.1f} GiB"
                for name in ("eager", "sdpa", "fused")
            ]  # fmt: skip
            faster = found["eager"]["ms"] / found["fused"]["ms"]
            lines.append([model, what[way], f"{length:,} x {batch}", *told, f"**{faster:.2f}**"])
    return table(*lines)


def fast():
    """Return what a converted BERT base takes on an H200, beside the stock model."""
    found = {(r["contender"], r["mode"], r["length"]): r for r in CONVERTED}
    lengths = list(dict.fromkeys(r["length"] for r in CONVERTED))
    lines = [["", *(f"{length:,}" for length in lengths)]]
    for name, mode in dict.fromkeys((r["contender"], r["mode"]) for r in CONVERTED):
        rows = [found[name, mode, length] for length in lengths]
        lines.append([f"{name}, {mode}", *(
            f"{r['ms']['p50']:.1f} ({r['x stock sdpa']:.2f} ×)" for r in rows
        )])  # fmt: skip
    return table(*lines)


def whole_call():
    """Return what a call with positions takes, scores, band and all gradients included."""
    names = {"ours, no positions": "none", "TISA, fitted": "TISA, fitted kernels", "T5": "T5",
             "NearFar": "NearFar", "KERPLE": "KERPLE", "TISA v2": "TISA v2",
             "ALiBi": "ALiBi"}  # fmt: skip
    found = {(r["length"], r["dim"], r["causal"], r["way"], r["contender"]): r["x"] for r in WHOLE}
    kinds = dict.fromkeys(key[:3] for key in found if key[3] != "host")
    lines = [["tokens", *names.values()]]
    for length, dim, causal in kinds:
        label = f"{length:,}" + f", {dim} wide" * (dim != 64) + ", causal" * causal
        lines.append([label, *(
            " / ".join(f"{found[length, dim, causal, way, name]:.2f}" for way in ("graph", "eager"))
            for name in names
        )])  # fmt: skip
    ((length, dim, causal),) = {key[:3] for key in found if key[3] == "host"}
    hosts = [f"{found[length, dim, causal, 'host', name]:.2f}" for name in names]
    return table(*lines, ["the host alone, 128 tokens", *hosts])


def gated():
    """Return what gates add to a causal call."""
    names = {"no scores, gates": "no scores", "TISA, gates": "TISA, fitted kernels",
             "NearFar, gates": "NearFar"}  # fmt: skip
    found = {(row["length"], row["contender"]): row for row in GATED}
    lengths = sorted({length for length, _ in found})
    lines = [["", *(f"{n:,} tokens" for n in lengths)]]
    for name, label in names.items():
        lines.append([label, *(
            f"{row['x cuDNN']:.2f} × cuDNN, {row['x without gates']:.2f} × without gates"
            for row in (found[n, name] for n in lengths)
        )])  # fmt: skip
    flex = "FlexAttention, gates"
    lines.append(["FlexAttention, without the gates' gradient",
                  *(f"{found[n, flex]['x cuDNN']:.2f} × cuDNN" for n in lengths)])  # fmt: skip
    return table(*lines)


def probe():
    """Return what the review measured of a T5-base encoder on an H200."""
    lines = [["tokens x batch", "step, ms", "times as fast", "forward, ms", "step, GiB"]]
    for size, found in PROBE["sizes"].items():
        step = found["step ms"]
        faster = step["stock"] / step["probe"] if isinstance(step["stock"], float | int) else None
        lines.append([
            "{:,} x {}".format(*map(int, size.split("x"))),
            f"{step['stock']} → {step['probe']}", f"{faster:.1f}" if faster else "–",
            *(f"{found[w]['stock']} → {found[w]['probe']}" for w in ("forward ms", "step GiB")),
        ])  # fmt: skip
    return table(*lines)


def real():
    """Return how far a published model is from float64, fused and not."""
    whats = list(MPNET["off"]["float32"]["stock"])
    lines = [["dtype", "model", *whats]]
    for dtype, models in MPNET["off"].items():
        for name, off in models.items():
            lines.append([dtype, name, *(f"{off[what]:.1e}" for what in whats)])
    return table(*lines)


def conformance():
    """Return how far each method is from what its authors' code computes."""
    lines = [["method", "options", "the authors' code", "what was changed to run it", "outputs",
              "gradients"]]  # fmt: skip
    for row in CONFORMANCE["rows"]:
        options = ", ".join(f"{k}={v}" for k, v in row["position_options"].items())
        decoder = ", decoder" if row["is_causal"] else ""
        where = f"https://github.com/{row['repository']}/tree/{row['commit']}"
        lines.append([
            f"`{row['position']}`{decoder}", options, f"[{row['repository']}]({where})",
            row["changed"], f"{row['output']:.0e}", f"{row['gradients']:.0e}",
        ])  # fmt: skip
    return table(*lines)


def scored():
    """Return what is left, and what is kept, of a model converted with each function."""
    lines = [["scores", "numbers", "divergence, mean of heads", "worst head",
              "cosine to original", "word orders", "who did what"]]  # fmt: skip
    for row in SCORED["rows"]:
        name = "none" if row["scoring"] == "tisa:num_kernels=0" else f"`{row['scoring']}`"
        lines.append([
            name, f"{row['numbers']:,}", f"{row['divergence']:.4f}", f"{row['worst_head']:.3f}",
            f"{row['closeness']:.4f}", f"{row['orders']:.3f}", f"{row['pairs']:.3f}",
        ])  # fmt: skip
    return table(*lines)


def extended():
    """Return how near a model stays to the original with a part of its position table."""
    first = EXTENDED["minilm"][0]
    lengths = list(first["cosine by length"])
    lines = [["", *(f"{n} tokens" for n in lengths), "order-match, each order", "numbers",
              "seconds"]]  # fmt: skip
    for model, rows in EXTENDED.items():
        for row in rows:
            if "cosine by length" not in row:
                continue
            lines.append([
                f"{NAMES[model]}: {row['variant']}",
                *(f"{row['cosine by length'][n]:.4f}" for n in lengths),
                " ".join(f"{x:.3f}" for x in row["order-match by order"]),
                f"{row['numbers']:,}", f"{row['processor_seconds']:.0f}",
            ])  # fmt: skip
    return table(*lines)


def extended_beyond():
    """Return how near a pass over a whole document is to the mean of the original's pieces."""
    found = [(model, row) for model, rows in EXTENDED.items() for row in rows
             if "cosine beyond the table" in row]  # fmt: skip
    lengths = list(found[0][1]["cosine beyond the table"])
    lines = [["", *(f"{int(n):,} tokens" for n in lengths)]]
    for model, row in found:
        cells = (row["cosine beyond the table"][n] for n in lengths)
        lines.append([f"{NAMES[model]}: {row['variant']}",
                      *(f"{own:.3f} (others {others:.3f})" for own, others in cells)])  # fmt: skip
    return table(*lines)


RESULTS = (shares, far, decoder_rates, decoder_best, decoder_gate, decoder_answers, rates, encoder,
           where)  # fmt: skip


def distilled():
    """Return what a distillation with a held-out check does, by length and to broad kernels."""
    record = json.loads((DOCS / "records/2026-11-20-conversion-distilled.json").read_text())
    header = ["", "16 tokens", "128 tokens", "512 tokens", "mean &#124;f&#124; at ±30 tokens"]
    lines = [f"| {' | '.join(header)} |".replace("|  |", "| |"), "|---" * len(header) + "|"]
    for row in record["rows"]:
        near = (f"{value:.4f}" for value in row["cosine by length"].values())
        steps = f", {row['steps']} steps" if "steps" in row else ""
        name = f"{row['positions']}, {row['what']}{steps}"
        lines.append(f"| {name} | {' | '.join(near)} | {row['far']:.3f} |")
    return "\n".join(lines) + "\n"


def long_articles():
    """Return what is found of articles by sentences of their last eighth."""
    return _long("2026-11-19-long", "article, last eighth", (ONE, SEVERAL))


def long_passkey():
    """Return what is found of passkeys."""
    return _long("2026-11-20-long-hidden", "passkey", (ONE, SEVERAL))


def long_needle():
    """Return what is found of needles with several vectors."""
    return _long("2026-11-20-long-hidden", "needle", (SEVERAL,))


def _long(folder, task, kinds):
    record = json.loads((DOCS / "records" / folder / "long.json").read_text())
    lines = []
    for kind in kinds:
        cells = long_table(record, "minilm", task, kind)
        cells[0][0] = kind
        lines += ["", as_markdown(cells[0], cells[1:]), ""]
    return "\n".join(lines)


PAGES = {"results.md": RESULTS,
         "huggingface.md": (fast, scored, extended, extended_beyond, distilled),
         "long.md": (long_articles, long_passkey, long_needle),
         "reliability.md": (faults, flips, calls),
         "fused.md": (fused, fused_gpu, fused_others, probe, real),
         "../README.md": (fused_steps,), "attention.md": (whole_call, gated),
         "methods.md": (conformance,)}  # fmt: skip


def page(text, tables=RESULTS):
    """Return the text with every table as its records have it."""
    for made in tables:
        marks = rf"(<!-- {made.__name__} -->\n).*?(<!-- end of {made.__name__} -->)"
        text, found = re.subn(marks, lambda m, made=made: m[1] + made() + m[2], text, flags=re.S)
        assert found == 1, made.__name__
    return text


if __name__ == "__main__":
    for name, tables in PAGES.items():
        path = DOCS / name
        path.write_text(page(path.read_text(), tables))
