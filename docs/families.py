"""Write the tables of docs/families.md anew, from the record of the sweep.

    python docs/families.py

The record is made by `tests/hf/sweep.py`. A test compares the page with what is made here.
"""

import json
import re
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parent
RECORD = DOCS / "records/2026-11-19-every-type.json"
CHECKS = ("keep", "replace", "stock")


def rows(record):
    """Yield (type, part or "", cells) of each class in a record, parts of a model after it."""

    def with_parts(model_type, place, row):
        yield model_type, place, row
        for name, part in row.get("parts", {}).items():
            yield from with_parts(model_type, f"{place}.{name}".lstrip("."), part)

    for model_type, found in record["types"].items():
        for row in found:
            yield from with_parts(model_type, "", row)


def reason(cell):
    """Return a refusal without the names of one class, so that equal ones are told once."""
    said = re.sub(r"^refused(?: by transformers)?: ", "", cell)
    said = re.sub(r"^attn_implementation: ", "", said)
    said = re.sub(r"^\w+ hands", "it hands", said)
    said = re.sub(r"no attention of \w+ goes", "no attention of it goes", said)
    said = re.sub(r"^\w+ has no table", "it has no table", said)
    said = re.sub(r"ignored by \w+, whose", "ignored by a model whose", said)
    return re.sub(r"convert a part alone: .*", "the rows below it are its parts", said)


def counted(record):
    """Return how many classes have which answer, as a table."""
    lines = ['| | `keep` | `replace` | "tisa" in the stock model |\n', "|---|---|---|---|\n"]
    cells = [row for _, _, row in rows(record) if "keep" in row]
    for name, starts in (("exact", "exact"), ("refused", "refused"), ("never reached", "not")):
        count = [sum(r.get(check, "").startswith(starts) for r in cells) for check in CHECKS]
        lines.append(f"| {name} | " + " | ".join(str(n or "–") for n in count) + " |\n")
    return "".join(lines)


def language(record):
    """Return the table of all classes that read tokens, refusals by their number, and these."""
    numbers = {}

    def short(cell):
        if cell is None:
            return ""
        if cell.startswith("exact"):
            return "✓" + cell.removeprefix("exact").replace(";", ",")
        if cell.startswith("not reached"):
            return "="
        return f"– {numbers.setdefault(reason(cell), len(numbers) + 1)}"

    lines = ["| type | class | `keep` | `replace` | stock |\n", "|---|---|---|---|---|\n"]
    for model_type, place, row in rows(record):
        if any(check in row for check in CHECKS):
            named = f"{model_type}, its `{place}`" if place else model_type
            cells = " | ".join(short(row.get(check)) for check in CHECKS)
            lines.append(f"| {named} | {row['class']} | {cells} |\n".replace("|  |", "| |"))
    why = "".join(f"{number}. {said}\n" for said, number in numbers.items())
    return "".join(lines) + "\n" + why


def others(record):
    """Return what was not tried, and why."""
    inputs = Counter(row["input"] for _, _, row in rows(record) if "input" in row)
    lines = ["| input | classes |\n", "|---|---|\n"]
    lines += [f"| `{name}` | {count} |\n" for name, count in sorted(inputs.items())]
    lines += ["\n| not built tiny | why |\n", "|---|---|\n"]
    for model_type, _, row in rows(record):
        if "not built" in row:
            why = row["not built"].replace("|", "/").replace("<", "‹").replace("*", "")[:100]
            lines.append(f"| {model_type} | {why} |\n")
    return "".join(lines)


def page(text):
    """Return the text with every table as the record has it."""
    record = json.loads(RECORD.read_text())
    text = re.sub(r"transformers \d[\d.]*,", f"transformers {record['transformers']},", text)
    for made in (counted, language, others):
        marks = rf"(<!-- {made.__name__} -->\n).*?(<!-- end of {made.__name__} -->)"
        text, found = re.subn(
            marks, lambda m, made=made: m[1] + made(record) + m[2], text, flags=re.S
        )
        assert found == 1, made.__name__
    return text


if __name__ == "__main__":
    families = DOCS / "families.md"
    families.write_text(page(families.read_text()))
