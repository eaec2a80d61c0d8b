"""The folder for Hugging Face's Kernel Hub: what is asked of it, and what its operator computes."""

import ast
import base64
import hashlib
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).parent.parent
_SOURCE = importlib.util.spec_from_file_location("hub_kernel", ROOT / "release/hub_kernel.py")
hub_kernel = importlib.util.module_from_spec(_SOURCE)
_SOURCE.loader.exec_module(hub_kernel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "kernel"
    hub_kernel.assemble(out, "somebody/tisa-attention")
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    """Return a function that imports a variant as `kernels` does: under its id, from its path."""
    found = {}

    def load(backend):
        if backend not in found:
            variant = folder / "build" / f"torch-{backend}"
            name = json.loads((variant / "metadata.json").read_text())["id"]
            source = importlib.util.spec_from_file_location(name, variant / "__init__.py")
            found[backend] = sys.modules[name] = importlib.util.module_from_spec(source)
            source.loader.exec_module(found[backend])
        return found[backend]

    yield load
    for module in found.values():
        for name in [n for n in sys.modules if n.split(".")[0] == module.__name__]:
            del sys.modules[name]


def test_it_has_what_the_hub_asks_for(folder):
    made = tomllib.loads((folder / "build.toml").read_text())
    assert made["general"]["hub"]["repo-id"] == "somebody/tisa-attention"
    assert set(made) == {"general", "torch-noarch"}
    source = folder / "torch-ext/tisa_attention"
    assert (source / "__init__.py").is_file()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            # Its own relatively; jaxtyping where it is installed (shapes.py).
            allowed = {*sys.stdlib_module_names, "torch", "triton"}
            allowed |= {"jaxtyping"} if path.name == "shapes.py" else set()
            assert {name.split(".")[0] for name in names} <= allowed, path
        assert "tisa::" not in path.read_text().replace("`tisa::", ""), path
    for backend in made["general"]["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        told = json.loads((variant / "metadata.json").read_text())
        assert told["backend"]["type"] == backend
        assert told["id"].isidentifier()
        files = [p for p in variant.rglob("*") if p.is_file() and p.name != "metadata.json"]
        files = [p for p in files if "__pycache__" not in p.parts]
        digests = {
            str(p.relative_to(variant)):
                base64.b64encode(hashlib.sha256(p.read_bytes()).digest()).decode() for p in files
        }  # fmt: skip
        assert told["digest"] == {"algorithm": "sha256", "files": digests}
        # What the builder would take from the sources, and the namespace.
        assert {*digests} == {str(p.relative_to(source)) for p in source.rglob("*.*")} | {"_ops.py"}


def test_the_folder_must_be_new_and_the_repository_a_name(folder, tmp_path):
    with pytest.raises(ValueError, match="must be a new folder"):
        hub_kernel.assemble(folder, "somebody/tisa-attention")
    with pytest.raises(ValueError, match="must be ORGANISATION/NAME"):
        hub_kernel.assemble(tmp_path / "new", "tisa-attention")


def by_formula(query, key, value, scores):
    """Return softmax(QKᵀ / √d + F) V with F[i, j] = scores[j − i], one entry at a time."""
    queries, keys = query.shape[-2], key.shape[-2]
    where = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries) + keys - 1
    logits = query @ key.mT / query.shape[-1] ** 0.5 + scores[:, where]
    return logits.softmax(-1) @ value


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa", "triton"])
@pytest.mark.parametrize("length", [1, 17])
def test_it_computes_the_formula_with_all_gradients(loaded, backend, length):
    if backend == "triton":
        pytest.importorskip("triton", reason="interprets the fused kernels")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here: the test below runs them")
    kernel = loaded("cpu")
    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, length, 8) for _ in range(3)]
    inputs.append(torch.randn(3, 2 * length - 1))
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    expected, found = by_formula(*exact), kernel.attention(*inputs, backend=backend)
    upstream = torch.randn_like(found)
    assert_close(found, expected.float(), atol=2e-6, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, exact, upstream.double()), strict=True,
    ):  # fmt: skip
        assert_close(one, other.float(), atol=1e-5, rtol=1e-4)


def test_two_variants_live_side_by_side_with_the_package(loaded):
    import tisa

    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 9, 4).unbind()
    outputs = []
    for module in (tisa, loaded("cpu"), loaded("cuda")):
        torch.manual_seed(2)
        scoring = module.T5Buckets(2)
        torch.manual_seed(3)
        outputs.append(module.attention(query, key, value, scoring, dropout_p=0.5))
    assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    assert_close(outputs[2], outputs[0], rtol=0, atol=0)
    names = {loaded(backend).__name__ for backend in ("cpu", "cuda")}
    assert len(names) == 2
    for name in names:
        assert hasattr(getattr(torch.ops, name), "chunked_forward")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_fused_kernels(loaded):
    kernel = loaded("cuda")
    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, 301, 64, device="cuda").bfloat16() for _ in range(3)]
    inputs.append(torch.randn(3, 601, device="cuda"))
    inputs = [x.requires_grad_() for x in inputs]
    found = kernel.attention(*inputs, backend="triton")
    expected = by_formula(*(x.detach().double().cpu() for x in inputs))
    assert_close(found.double().cpu(), expected, atol=2e-2, rtol=2e-2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), inputs))
