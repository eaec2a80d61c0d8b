"""What docs/analysis.md says is what its record has."""

import json
from pathlib import Path

import pytest
import torch

from tisa.analysis.whole import measure_blocks

ROOT = Path(__file__).parents[2]


def test_the_numbers_in_the_analysis_document_are_those_of_the_record():
    """The table of three models in docs/analysis.md is the newest record's."""
    record = json.loads(max((ROOT / "docs/records").glob("*-analysis.json")).read_text())
    document = (ROOT / "docs/analysis.md").read_text()
    for model in record["models"]:
        if model["name"] == "rxnfp-fine-tuned":
            assert f"R² 0.369 and {model['toeplitz']['table']['r2']:.3f}" in document
            continue
        table, sensitive = model["toeplitz"]["table"], model["layers_as_read"][0]["sensitive"]
        cells = [
            f"{table['r2']:.3f} ({table['null']:.3f})",
            f"{table['off_diagonal']:.3f} ({table['off_diagonal_null']:.3f})",
            f"{sum(sensitive)} of {len(sensitive)}",
            f"{model['pca']['dimensions_90']} of {model['width']}",
        ]
        assert any(
            model["name"] in line and all(c in line for c in cells)
            for line in document.splitlines()
        ), cells


@pytest.mark.parametrize(
    ("positions", "ends"),
    [
        (271, [(0, 128), (128, 256)]),
        (272, [(0, 128), (128, 256), (256, 272)]),
        (256, [(0, 128), (128, 256)]),
        (255, [(start, min(start + 32, 255)) for start in range(0, 255, 32)]),
        (79, [(0, 32), (32, 64)]),
    ],
)
def test_blocks_are_those_that_the_document_tells(positions, ends):
    document = (ROOT / "docs/analysis.md").read_text()
    assert "0–127, 128–255, … alone (of tables below 256 positions: 0–31, 32–63, …)" in document
    assert "a last block of fewer than 16 is left out" in document
    found = measure_blocks(torch.randn(positions, 4))
    assert [(start, end) for start, end, _ in found] == ends


def test_times_in_the_analysis_document_are_those_of_the_record():
    record = json.loads(max((ROOT / "docs/records").glob("*-analysis-time.json")).read_text())
    document = (ROOT / "docs/analysis.md").read_text()
    for run in record["runs"].values():
        times = f"| {run['wall_s']} s | {run['cpu_s']} s "
        assert f"{times}| {run['peak_mb']:,} MB | {run['page_mb']:.2f} MB |" in document
    # What the tool promises at these shapes.
    assert record["runs"]["bert-base"]["wall_s"] < 60
    assert record["runs"]["bert-base"]["peak_mb"] < 2000
    assert record["runs"]["bert-base"]["page_mb"] < 5
    assert record["runs"]["longformer-4096"]["wall_s"] < 180


def test_a_large_model_takes_what_the_document_says():
    record = json.loads(max((ROOT / "docs/records").glob("*-analysis-large.json")).read_text())
    document = (ROOT / "docs/analysis.md").read_text()
    for run in record["runs"].values():
        size = f"| {run['rows']:,} × {run['width']:,} | {run['wall_s']} s | {run['cpu_s']} s "
        assert f"{size}| {run['peak_mb']:,} MB |" in document
        assert (run["layers"], run["width"], run["words"]) == (24, 1024, 50000)
        assert run["wall_s"] < 180
        assert run["peak_mb"] < 2000
    assert [run["rows"] for run in record["runs"].values()] == [512, 32768]
