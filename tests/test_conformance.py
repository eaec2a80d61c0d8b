"""Outputs and gradients of the authors' own code, run outside this repository, against ours.

    python tests/test_conformance.py      writes the record of which docs/methods.md has the table

A file of `tests/conformance/` has an input, the maps of an attention layer, the authors' weights by
the names of their code (`from_reference` reads them), the output and the gradients of all of it.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import tisa
from tisa.positions import METHODS, PositionConfig
from tisa.positions.published import from_reference

FOLDER = Path(__file__).parent / "conformance"
ROOT = FOLDER.parents[1]
RECORD = ROOT / "docs/records/2026-11-19-conformance.json"
FILES = sorted(FOLDER.glob("*.safetensors"))
KEPT = ("position", "position_options", "is_causal", "repository", "commit", "changed")


def read(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["told"]), tensors


def part(tensors, prefix):
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def layer_of(told, tensors):
    """Return our layer with the maps and the weights of a file."""
    config = PositionConfig(
        num_hidden_layers=1,
        options=told["position_options"],
        **{name: told[name] for name in (
            "hidden_size", "num_attention_heads", "max_position_embeddings", "is_causal")},
    )  # fmt: skip
    theirs, name = part(tensors, "theirs."), told["position"]
    position = from_reference(name, theirs, config) if theirs else tisa.build_position(name, config)
    layer = tisa.SelfAttention(
        told["hidden_size"], told["num_attention_heads"], position=position,
        is_causal=told["is_causal"],
    ).double()  # fmt: skip
    # A method that was built apart would leave its place at the input to a transformer.
    layer.embeds = True
    values = {f"attention.{key}": t for key, t in part(tensors, "maps.").items()}
    with torch.no_grad():
        for key, parameter in layer.attention.named_parameters(prefix="attention"):
            # What their code does not have.
            parameter.copy_(values.pop(key, torch.zeros_like(parameter)))
    assert not values, sorted(values)
    return layer


def as_theirs(told, layer, theirs):
    """Return the gradients of our parameters as those of the authors' weights.

    Each of our numbers is one of theirs, perhaps times a factor and plus a constant. Which one
    `from_reference` says, asked with numbers from 1 on in the place of the weights.
    """

    def filled(flat):
        parts = flat.split([t.numel() for t in theirs.values()])
        state = {n: p.view_as(t) for (n, t), p in zip(theirs.items(), parts, strict=True)}
        made = from_reference(told["position"], state, layer.position.config)
        return torch.cat([p.detach().flatten() for p in made.parameters()])

    size = sum(t.numel() for t in theirs.values())
    zeros = torch.zeros(size, dtype=torch.float64)
    constants = filled(zeros)
    factors = filled(zeros + 1) - constants
    which = (filled(torch.arange(size, dtype=torch.float64)) - constants) / factors
    ours = torch.cat([p.grad.flatten() for p in layer.position.parameters()])
    found = zeros.index_add(0, which.round().long(), ours * factors)
    parts = found.split([t.numel() for t in theirs.values()])
    return {n: p.view_as(t) for (n, t), p in zip(theirs.items(), parts, strict=True)}


def differences(path):
    """Return how far our output and gradients are from a file's, at most, over their largest."""
    told, tensors = read(path)
    layer, theirs = layer_of(told, tensors), part(tensors, "theirs.")
    x = tensors["x"].clone().requires_grad_()
    output = layer(x)
    (output * tensors["cotangent"]).sum().backward()
    gradients = {"x": x.grad}
    attention = dict(layer.attention.named_parameters())
    gradients |= {f"maps.{n}": attention[n].grad for n in part(tensors, "maps.")}
    if theirs:
        own = as_theirs(told, layer, theirs)
        gradients |= {f"theirs.{name}": gradient for name, gradient in own.items()}
    expected = part(tensors, "gradient.")
    assert set(gradients) == set(expected)
    # A gradient that is 0 but for rounding (of the keys' bias) has no scale of its own.
    least = 1e-2 * max(float(t.abs().max()) for t in expected.values())
    worst = max(off(gradients[name], expected[name], least) for name in expected)
    return told, off(output.detach(), tensors["output"]), worst


def off(found, expected, least=0.0):
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ours_is_what_the_authors_code_computes(path):
    told, output, gradients = differences(path)
    assert max(output, gradients) <= 1e-12, (told["position"], output, gradients)


def test_every_file_is_small_and_says_where_it_is_from():
    for path in FILES:
        told, _ = read(path)
        assert path.stat().st_size < 100_000
        assert len(told["commit"]) == 40
        assert told["repository"].count("/") == 1
        assert told["changed"]
        assert told["position"] in METHODS


def test_the_table_in_the_docs_is_that_of_the_record():
    record = json.loads(RECORD.read_text())
    assert [row["file"] for row in record["rows"]] == [path.stem for path in FILES]
    for row, path in zip(record["rows"], FILES, strict=True):
        told, _ = read(path)
        assert {key: row[key] for key in KEPT} == {key: told[key] for key in KEPT}
        assert max(row["output"], row["gradients"]) <= 1e-12
    source = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(source)
    source.loader.exec_module(tables)
    page = (ROOT / "docs/methods.md").read_text()
    assert tables.page(page, tables.PAGES["methods.md"]) == page, "run: python docs/tables.py"


def measured():
    """Return the record: how far ours is from every file."""
    rows = []
    for path in FILES:
        told, output, gradients = differences(path)
        own = {key: told[key] for key in KEPT}
        rows.append({"file": path.stem, **own, "output": output, "gradients": gradients})
    return {"torch": torch.__version__, "date": "2026-11-19", "rows": rows}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measured(), indent=1) + "\n")
