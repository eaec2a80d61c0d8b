"""What lies beside a saved model: code and a card for people without this package, and a seal."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import tisa
from tisa.hf import core
from tisa.hf.verdict import Verdict
from tisa.parameters import is_vector
from tisa.store import CODE, MANIFEST, seal_folder

KIND = "converted model"
# The name of the copy of `core` beside a model, which its config names.
REMOTE = "modeling_tisa"
NOTHING: dict[str, Any] = {"cosines": {}, "limit": None}
# In the part of a card that is for machines.
LINES = r"(?:(?!---).*\n)*?"
LICENCE = re.compile(rf"\A---\n{LINES}license: *[\"']?([\w.+-]+)[\"']? *\n{LINES}---(?:\s|\Z)")


def write_card(
    model: PreTrainedModel, folder: str | os.PathLike[str], *, sentences: bool = False
) -> None:
    """Write README.md into the folder unless there is one; `sentences`: of a sentence encoder."""
    path = Path(folder) / "README.md"
    if not path.exists():
        path.write_text(card_of(model, sentences=sentences), encoding="utf-8")


def licence_of(folder: Path) -> str | None:
    """Return the licence that the card of the model in a folder names, or None."""
    path = folder / "README.md"
    found = LICENCE.match(path.read_text("utf-8", "replace")[:20_000]) if path.is_file() else None
    return found and found[1]


def replace_template(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write our card where README.md is the template of `push_to_hub`, to which nothing was added.

    transformers puts that template, or the card that the repository has, over what was saved.
    """
    from huggingface_hub import ModelCard, ModelCardData

    path = Path(folder) / "README.md"
    found: Any = ModelCard(path.read_text(encoding="utf-8"))
    template = ModelCard.from_template(ModelCardData(library_name="transformers"))
    known = {line.strip() for line in template.text.splitlines()}
    added = [line for line in found.text.splitlines() if line.strip() not in known]
    if any("automatically generated" not in line for line in added):
        return
    ours: Any = ModelCard(card_of(model))
    ours.data.tags = list(dict.fromkeys([*ours.data.tags, *(found.data.tags or [])]))
    ours.save(path)


def card_of(model: PreTrainedModel, *, sentences: bool = False) -> str:
    """Return the model card; `sentences`: with how a sentence encoder is loaded."""
    tisa = model.config.tisa
    scores = sum(p.numel() for n, p in model.named_parameters() if "offset_scores" in n)
    fold = sum(p.numel() for n, p in model.named_parameters() if is_vector(n))
    origin = model.config.name_or_path or f"a {tisa['base_model_type']} model"
    kept = {
        "keep": "The model's own position embeddings are kept; the scores come on top of them.",
        "replace": f"The model's position table ({tisa['replaced_parameters']:,} numbers) is left "
        f"out; {fold:,} numbers stand for what of it had nothing to do with order. Inputs of any "
        "length are read, which does not say how well: see below.",
        "extend": f"Of the model's position table ({tisa['replaced_parameters']:,} numbers) the "
        f"vectors at {len(tisa.get('places', ()))} places are left ({fold:,} numbers), and lines "
        "between them: place counts as it did, but slowly. Beyond the last of them it no longer "
        "does. Inputs of any length are read, which does not say how well: see below.",
    }[tisa["positions"]]
    if tisa.get("keeps_relative_bias"):
        kept += " The model's own table of the offset stays as it was."
    if tisa.get("window") is not None:
        kept += f" A token sees others up to {tisa['window']} tokens away"
        kept += ", and the first and the last one" * bool(tisa["sinks"]) + "."
        kept += " These two see all." * (tisa["sinks"] == "global")
    start = {
        "fit": "The scores were fitted to the attention of the model's own heads.",
        "zero": "The scores began at 0, where they change nothing.",
        "reference": "The scores began with the random kernels of the author's code.",
    }[tisa["start"]]
    formula = (
        f"f(k) = Σ a·exp(−|b|·(k − c)²), to its logits. {scores:,} numbers,\n"
        f"{tisa['num_kernels']} kernels per head"
    )
    needs = "import tisa.hf  # or trust_remote_code=True without the package"
    if other := tisa.get("scoring"):
        formula = f"f(k) of `{other['name']}`, to its logits. {scores:,} numbers"
        needs = "import tisa.hf"
        if other["source"]:
            needs += f"\nfrom {other['source']['module'] or 'mine'} import {other['source']['cls']}"
    measured = tisa.get("measured")
    verdict = "\n".join(f"- {line}" for line in Verdict.read(measured or NOTHING).told())
    made_from = tisa.get("made_from", {})
    licence = made_from.get("license")
    rights = "that of the model that it was made from, whose card was not there to be read"
    if licence is not None:
        rights = f"{licence}, as the card of the model says that it was made from"
    library, usage = "transformers", ""
    if sentences:
        library, usage = "sentence-transformers", _usage(needs)
    files = made_from.get("weights") or {"all tensors": made_from.get("tensors", "not known")}
    sums = "\n".join(f"- {name}: {digest}" for name, digest in files.items())
    # A name on the hub, not a folder: the hub then links both models.
    hub = str(origin).count("/") == 1 and not Path(str(origin)).exists() and origin[0] not in "./~"
    base = f"base_model: {origin}\n" if hub else ""
    licensed = "" if licence is None else f"license: {licence}\n"
    return f"""---
library_name: {library}
{base}{licensed}tags:
- tisa
- {tisa["base_model_type"]}
---

# {Path(str(origin)).name} with translation-invariant self-attention

Made from {Path(str(origin)).name} with the Python package tisa: every attention head adds a score
of the offset between two tokens, {formula}. {kept} {start}

```python
{needs}
from transformers import AutoModel

model = AutoModel.from_pretrained("path/to/this/folder")
```
{usage}
How near it is to the model that it was made from, as it was converted:

{verdict}

SHA-256 of what it was made from:

{sums}
- tokens of the calibration text: {made_from.get("calibration") or "none was needed"}

Licence: {rights}.

Method: Wennberg & Henter, "The Case for Translation-Invariant Self-Attention in Transformer-Based
Language Models", ACL 2021.
"""


def _usage(needs: str) -> str:
    return f"""
As a sentence encoder:

```python
{needs}
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
```
"""


def write_remote_code(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write the copy of `core` that `trust_remote_code=True` reads, and name it in the config."""
    folder = Path(folder)
    (folder / f"{REMOTE}.py").write_bytes(Path(core.__file__).read_bytes())
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": f"{REMOTE}.TisaConfig"} | {
        name: f"{REMOTE}.{name.replace('Auto', 'Tisa', 1)}" for name in auto_classes(model)
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def seal(
    model: PreTrainedModel, folder: str | os.PathLike[str], patterns: Iterable[str] = ("*", "*/*")
) -> None:
    """Write the manifest: of the model's own files, or of all but the card, which people edit."""
    folder = Path(folder)
    paths = {path for some in patterns for path in folder.glob(some) if path.is_file()}
    paths |= {folder / "config.json", folder / f"{REMOTE}.py"}
    names = {path.relative_to(folder).as_posix() for path in paths} - {"README.md", MANIFEST}
    made_from = model.config.tisa.get("made_from", {})
    told = {
        "model": model.config.name_or_path,
        "weights": made_from.get("weights") or made_from.get("tensors"),
        "calibration": made_from.get("calibration"),
        "tisa": model.config.tisa,
        CODE: tisa.__version__,
    }
    seal_folder(folder, KIND, told, names)


def auto_classes(model: PreTrainedModel) -> list[str]:
    """Return the Auto classes that give this model's class, and AutoModel."""
    stock, config = type(model).stock, type(model.config).stock
    names = [name for name in modeling_auto.__all__ if name.startswith("AutoModelFor")]
    return ["AutoModel", *(name for name in names if core.auto_class(name, config) is stock)]
