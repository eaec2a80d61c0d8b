"""The tree is what the README says, layers hold, optional packages are optional."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SOURCES = sorted(p for p in (ROOT / "tisa").rglob("*.py"))

# What a development environment has and a user's may not have.
OPTIONAL = [
    "beartype", "hypothesis", "importlinter", "jaxtyping", "matplotlib", "numpy", "pytest", "rich",
    "safetensors", "scipy", "torchdiffeq", "tqdm", "transformers", "triton",
]  # fmt: skip


def run(program, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, cwd=ROOT
    )


def tree_of_the_readme():
    """Return the paths that the README's tree names, in its order."""
    (block,) = re.findall(r"## The tree.*?```\n(.*?)```", README, flags=re.DOTALL)
    folders, paths = [], []
    for line in block.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        paths.append("/".join([*folders, name]).replace("//", "/"))
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return paths


def test_the_tree_in_the_readme_is_the_tree():
    named = [p for p in tree_of_the_readme() if p.startswith("tisa/") and p.endswith(".py")]
    there = {str(p.relative_to(ROOT)) for p in SOURCES if p.name != "__init__.py"}
    listed_by_themselves = there - set(named)
    assert set(named) <= there
    for path in sorted(listed_by_themselves):
        # A folder on one line: its own docstring names its files.
        folder = path.rsplit("/", 1)[0]
        assert f"{folder}/" in tree_of_the_readme(), path
        assert not any(p.startswith(f"{folder}/") for p in named), path
        source = (ROOT / folder / "__init__.py").read_text()
        listing = ast.get_docstring(ast.parse(source)) or ""
        # Or the registry there does.
        registered = f'Method("{Path(path).name}"' in re.sub(r"\(\s+", "(", source)
        listed = re.search(rf"^ *{Path(path).name}\b", listing, flags=re.MULTILINE)
        assert listed or registered, path
    for path in tree_of_the_readme():
        assert (ROOT / path).exists(), path
    scripts = {str(p.relative_to(ROOT)) for n in ("benchmarks", "examples")
               for p in (ROOT / n).glob("*.py")}  # fmt: skip
    assert scripts <= set(tree_of_the_readme())


def test_every_line_of_the_tree_imports_only_from_lines_above():
    order = [p for p in tree_of_the_readme() if p.startswith("tisa/") and p.endswith(".py")]
    rank = {path.removesuffix(".py").replace("/", "."): i for i, path in enumerate(order)}
    for path in order:
        module = path.removesuffix(".py").replace("/", ".")
        imported = set()
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        for other in imported & set(rank):
            assert rank[other] < rank[module], f"{module} imports {other}"


def test_import_layers_hold():
    answer = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout


def test_python_snippets_of_the_readme_run():
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        answer = run(snippet)
        assert answer.returncode == 0, answer.stderr


def test_the_package_needs_torch_alone():
    answer = run(
        "import sys\n"
        f"for name in {OPTIONAL}: sys.modules[name] = None\n"
        "import torch, tisa\n"
        "qkv = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]\n"
        "for scoring in (tisa.TISA(2), tisa.TISAv2(2), tisa.T5Buckets(2), tisa.ALiBi(2),\n"
        "                tisa.KerpleLog(2), tisa.KerplePower(2), tisa.NearFar(2)):\n"
        "    for backend in ('reference', 'chunked', 'sdpa', 'auto'):\n"
        "        out = tisa.attention(*qkv, scoring(5), band=scoring.support(1e-3),\n"
        "                             dropout_p=0.1, backend=backend)\n"
        "        out.sum().backward()\n"
        "for name in tisa.positions.METHODS:\n"
        "    if name != 'floater':\n"
        "        tisa.SelfAttention(4, 2, position=name)(torch.randn(1, 5, 4)).sum().backward()\n"
    )
    assert answer.returncode == 0, answer.stderr


def test_importing_takes_no_longer_than_torch_and_a_fifth_of_a_second():
    program = (
        "import time, torch\n"
        "start = time.process_time()\n"
        "import tisa\n"
        "print(time.process_time() - start)\n"
    )
    # The processor's time: on a busy machine the clock on the wall says nothing.
    times = [float(run(program).stdout) for _ in range(3)]
    assert min(times) < 0.2


def test_importing_has_no_side_effects():
    answer = run(
        "import torch\n"
        "before = (torch.get_default_dtype(), torch.initial_seed(), torch.get_num_threads())\n"
        "import sys, tisa\n"
        "assert before == (torch.get_default_dtype(), torch.initial_seed(),"
        " torch.get_num_threads())\n"
        "assert not [m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules]\n",
        "-W", "error",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


def test_public_names_are_there_and_documented():
    import tisa

    for name in tisa.__all__:
        assert getattr(tisa, name).__doc__, name
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in tisa.__all__:
        if name != "ScoringFunction":
            assert name in changelog, name


def test_versions_agree():
    import tisa

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {tisa.__version__}\n" in citation


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_house_rules(path):
    text = path.read_text()
    assert "from __future__ import annotations" not in text
    assert "os.environ" not in text
    assert "NotImplementedError" not in text
    assert len(text.splitlines()) <= 400
    assert text.startswith('"""')


def test_the_numbers_in_the_readme_are_those_of_the_record():
    """The table under "n = 4,096" is the newest CPU record's."""
    import json

    record = json.loads(max((ROOT / "benchmarks/results").glob("*-attention-cpu.json")).read_text())
    rows = {
        row["contender"]: row
        for row in record["rows"]
        if row["mode"] == "forward + backward" and row["case"]["length"] == 4096
    }
    limit = rows["sdpa, no positions"]["ms"]["p50"]
    for name in ("sdpa, no positions", "author's dense", "reference", "sdpa", "chunked"):
        seconds, peak = rows[name]["ms"]["p50"] / 1e3, rows[name]["peak_bytes"] / 2**20
        cells = f"| {seconds:.2f} s | {1e3 * seconds / limit:.2f} | {peak:,.0f} MiB |"
        assert any(name in line and cells in line for line in README.splitlines()), (name, cells)
    assert f"torch {record['torch']}" in README
    # What the operator promises (issue: chunked at most 1.5 × sdpa's time, a tenth of the memory).
    assert rows["chunked"]["ms"]["p50"] <= 1.5 * rows["sdpa"]["ms"]["p50"]
    assert rows["chunked"]["peak_bytes"] <= rows["reference"]["peak_bytes"] / 10


def test_the_table_of_capabilities_is_what_the_backends_say():
    pytest.importorskip("triton", reason="asks the fused backend too")
    answer = subprocess.run(
        [sys.executable, "docs/capabilities.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout in (ROOT / "docs/attention.md").read_text()


def test_the_gpu_numbers_in_the_readme_are_those_of_the_record():
    """The table of the fused kernels is the newest record's."""
    import json

    record = json.loads(max((ROOT / "benchmarks/results").glob("*-fused-gpu.json")).read_text())
    found = {
        (row["contender"], row["case"]["length"]): row["graph"]["p50"]
        for row in record["rows"]
        if row["mode"] != "forward" and row["case"]["dim"] == 64 and "graph" in row
        and not row["case"]["is_causal"] and row["case"]["queries"] is None
    }  # fmt: skip
    for (name, length), time in found.items():
        if length >= 512:
            cell = f"{time:.3g} ({time / found['cuDNN, no positions', length]:.2f} ×)"
            assert any(name in line and cell in line for line in README.splitlines()), (name, cell)
