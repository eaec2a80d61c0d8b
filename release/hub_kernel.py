"""Assemble the attention operator as a kernel of Hugging Face's Kernel Hub, in a new folder.

    python release/hub_kernel.py OUT --repository ORGANISATION/NAME

OUT has what kernel-builder reads (build.toml, flake.nix, torch-ext/) and, as there is nothing to
compile, what it would make of it (build/torch-cpu, build/torch-cuda): `kernels.get_local_kernel`
loads that. The sources are the package's, with what the hub asks for: imports within the kernel are
relative, and operators have a namespace that no other version has.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "tisa-attention"
# What a caller sees; all else comes along because one of these imports it.
PUBLIC = {
    "ops": ["attention"],
    "scoring": ["ALiBi", "KerpleLog", "KerplePower", "NearFar", "T5Buckets", "TISA", "TISAv2"],
}
# Those that were run. Triton's kernels need a GPU, all other backends of the operator do not.
BACKENDS = ("cpu", "cuda")
OPERATORS = re.compile(r'"tisa::(\w+)"')


def modules() -> dict[str, str]:
    """Return the sources of the operator and of what it imports, by their paths in the package."""
    found: dict[str, str] = {}
    left = [f"tisa/{package}/__init__.py" for package in PUBLIC]
    while left:
        path = left.pop()
        if path in found or not (ROOT / path).is_file():
            continue
        found[path] = (ROOT / path).read_text("utf-8")
        for node in ast.walk(ast.parse(found[path])):
            if isinstance(node, ast.Import):
                own = [name.name for name in node.names if name.name.startswith("tisa")]
                assert not own, f"{path}: import {own[0]} cannot be made relative"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tisa":
                place = node.module.replace(".", "/")
                names = [f"{place}/{name.name}" for name in node.names]
                left += [f"{p}{end}" for p in (place, *names) for end in (".py", "/__init__.py")]
    # Of the package itself, what is imported of it is imported from where it is.
    found.pop("tisa/__init__.py", None)
    return {path.removeprefix("tisa/"): text for path, text in sorted(found.items())}


def relative(path: str, text: str) -> str:
    """Return a module as it stands in the kernel."""
    dots = "." * len(Path(path).parts)
    text = re.sub(r"^(\s*from )tisa\.", rf"\g<1>{dots}", text, flags=re.MULTILINE)
    assert not re.search(r"^\s*(from|import) tisa\b", text, re.MULTILINE), path
    if OPERATORS.search(text):
        text = OPERATORS.sub(r'add_op_namespace_prefix("\1")', text)
        begin = ast.parse(text).body[1].lineno - 1
        lines = text.splitlines(keepends=True)
        lines.insert(begin, f"from {dots}_ops import add_op_namespace_prefix\n")
        text = "".join(lines)
    return text


def sources() -> dict[str, str]:
    """Return the kernel's files but for those that the builder adds."""
    files = {path: relative(path, text) for path, text in modules().items()}
    for name in ("native.cpp", "native_launch.h"):
        files[f"ops/triton/{name}"] = (ROOT / "tisa/ops/triton" / name).read_text("utf-8")
    lines = [f"from .{package} import {', '.join(names)}" for package, names in PUBLIC.items()]
    names = sorted(name for each in PUBLIC.values() for name in each)
    shown = "\n".join(f'    "{name}",' for name in names)
    head = '"""Attention with scores of the offset: the operator of the package tisa."""\n\n'
    files["__init__.py"] = head + "\n".join(lines) + f"\n\n__all__ = [\n{shown}\n]\n"
    return files


def operators_of(unique: str) -> str:
    """Return `_ops.py`, which the builder writes in other words: the namespace of the operators."""
    return (
        f'"""The namespace of this version\'s operators."""\n\nimport torch\n\n_NAME = "{unique}"\n'
        "ops = getattr(torch.ops, _NAME)\n\n\n"
        "def add_op_namespace_prefix(op_name: str) -> str:\n"
        '    """Return the operator\'s name with the namespace."""\n'
        '    return f"{_NAME}::{op_name}"\n'
    )


def build_toml(version: str, repository: str) -> str:
    """Return what kernel-builder is told."""
    listed = ", ".join(f'"{backend}"' for backend in BACKENDS)
    return (
        f'[general]\nname = "{NAME}"\nversion = {version.split(".")[0]}\nedition = 5\n'
        f'license = "MIT"\nbackends = [{listed}]\n\n[general.hub]\nrepo-id = "{repository}"\n\n'
        '[torch-noarch]\npyext = ["py", "cpp", "h"]\n'
    )


FLAKE = """{
  description = "Flake for the kernel tisa-attention";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def card(version: str, repository: str) -> str:
    """Return the card that the hub shows."""
    return f"""---
license: mit
library_name: kernels
tags: [kernels, attention]
---
# {NAME}

The attention operator of tisa {version}: scores of the offset between two tokens (TISA, T5's
buckets, ALiBi, KERPLE, NearFar) are added to the logits without an n × n tensor, on GPUs in fused
Triton kernels that train the scores too.

```python
import torch
from kernels import get_kernel

name = "{repository}"
tisa = get_kernel(name, version={version.split(".")[0]}, trust_remote_code=[name])
scoring = tisa.T5Buckets(12).cuda()
query, key, value = torch.randn(3, 2, 12, 512, 64, device="cuda").bfloat16().unbind()
output = tisa.attention(query, key, value, scoring)
```

It needs torch 2.9 or newer. Backends: {", ".join(BACKENDS)}. Whole models, conversion and analysis
are in the package: `pip install tisa`.
"""


def _write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")


def assemble(out: Path, repository: str) -> None:
    """Write the kernel's folder, which must be new."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"repository must be ORGANISATION/NAME on the hub, got {repository!r}")
    if out.exists():
        raise ValueError(f"out must be a new folder, and {out} is there; give another name")
    init = (ROOT / "tisa/__init__.py").read_text("utf-8")
    version = re.findall(r'__version__ = "(.+)"', init)[0]
    module, files = NAME.replace("-", "_"), sources()
    told = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:7]
    _write(out, {
        "build.toml": build_toml(version, repository), "flake.nix": FLAKE,
        "CARD.md": card(version, repository), "LICENSE": (ROOT / "LICENSE").read_text("utf-8"),
        **{f"torch-ext/{module}/{path}": text for path, text in files.items()},
    })  # fmt: skip
    for backend in BACKENDS:
        unique = f"_{module}_{backend}_{told}"
        made = {**files, "_ops.py": operators_of(unique)}
        digests = {
            path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for path, text in sorted(made.items())
        }
        metadata = {
            "name": NAME, "id": unique, "version": int(version.split(".")[0]), "license": "MIT",
            "python-depends": [], "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }  # fmt: skip
        made["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
        _write(out / "build" / f"torch-{backend}", made)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repository", required=True)
    told = parser.parse_args()
    try:
        assemble(told.out, told.repository)
    except ValueError as wrong:
        parser.error(str(wrong))


if __name__ == "__main__":
    main()
