"""What a cell starts from: the published model, converted, with fitted kernels that are kept.

Fitted (and distilled) kernels depend on the model, on the texts and on how they are made, not on
the seed. A folder holds each of them in a file named by its key: a few kilobytes, with its quality
and where it was made in the metadata. The key knows weights to float16 and tokens, no paths: what
one machine fitted to a model is found by another machine that has the model elsewhere, or in
float16.
"""

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.functional import cosine_similarity

import tisa.hf
from tisa.hf.calibration import Batch, batches_of, tokens_of
from tisa.hf.fit import fit_scores
from tisa.hf.registry import config_of, proved
from tisa.parameters import is_score
from tisa.shapes import Tensor
from tisa.store import Damaged, locked, opened, sealed, tensors_digest, write_bytes
from tisa.weights import read_checkpoint
from tisa_lab.glue.batches import Row
from tisa_lab.glue.cell import BASELINE, Cell
from tisa_lab.glue.tasks import task_named
from tisa_lab.record import surroundings

# Part of every key; another one when starts of before must not be taken any more.
FORMAT = 1
# Of a file that is not as it was written.
AGAIN = "remove it, and it is made again"
# Texts for each step of a distillation.
ROWS = 32
# The names that dropout has in the configs of the models.
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")


def stock(cell: Cell) -> tuple[Any, Any, int]:
    """Return the tokenizer, the model with a new head of the seed, and how many tokens it takes."""
    transformers.set_seed(cell.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cell.model, trust_remote_code=False)
    model = stock_model(cell)
    return tokenizer, model, min(cell.recipe.max_length, tisa.hf.calibration.length_limit(model))


def stock_model(cell: Cell) -> Any:
    """Return the published model with a new head for the task, or say why there is none."""
    task = task_named(cell.task)
    checkpoint = read_checkpoint(cell.model)
    config = config_of(checkpoint)
    config.name_or_path = cell.model
    config.num_labels = max(1, len(task.labels))
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    if cell.recipe.dropout is not None:
        for name in DROPOUT:
            if hasattr(config, name):
                setattr(config, name, cell.recipe.dropout)
    check_head(cell.model, config)
    cls = transformers.AutoModelForSequenceClassification._model_mapping[type(config)]
    return proved(cls, config, checkpoint, new_head=True, dtype=torch.float32)


def config_named(model: str) -> Any:
    """Return the config of a published model, whose sizes are those of its weights."""
    return config_of(read_checkpoint(model))


def check_head(model: str, config: Any) -> None:
    """Refuse a model that cannot classify texts."""
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"model: {model} is a {config.model_type}, for which transformers has no "
            "classification head; take an encoder such as BERT, RoBERTa or ALBERT"
        )


def start_of(
    cell: Cell,
    model: Any,
    tokenizer: Any,
    train: list[Row],
    starts: str | Path | None = None,
) -> Any:
    """Return the model that is trained: converted, and frozen where the cell says so.

    Fitted kernels come from the folder `starts` if it has them, and are kept there if it has not.
    What is known of them is in the config of the model, as `tisa["fitted"]`.
    """
    # Packed batches are read by converted models alone; without kernels they are as they were.
    variant = cell.variant
    if variant == BASELINE and cell.recipe.batches == "padded":
        return model
    rows = calibration_rows(cell, train)
    converted = tisa.hf.convert(
        model,
        num_kernels=variant.num_kernels,
        positions=variant.positions,
        init="reference" if variant.init == "reference" else "zero",
        fold=variant.fold,
        calibration=rows if variant.fold else None,
        tokenizer=tokenizer,
    )
    if variant.init == "fit":
        made = _Making(converted, model, tokenizer, train, starts)
        converted.config.tisa["fitted"] = made.kept(cell)
    for name, parameter in converted.named_parameters():
        if "offset_scores" in name and (variant.frozen or parameter.numel() == 0):
            parameter.requires_grad_(False)
    return converted


def calibration_rows(cell: Cell, train: list[Row]) -> list[Row]:
    """Return the training rows that kernels are fitted on: the same for every seed."""
    return _chosen(train, cell.recipe.calibration_rows)


def _chosen(train: list[Row], count: int) -> list[Row]:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    return [train[i] for i in order[:count].tolist()]


def start_key(cell: Cell, model: Any, train: list[Row]) -> str:
    """Return 16 hexadecimal digits that name a start: the same wherever the model lies."""
    told: list[Any] = [[FORMAT, cell.variant.num_kernels, cell.variant.fold], fingerprint(model)]
    told.append(_tokens(calibration_rows(cell, train)))
    steps = cell.variant.distil_steps
    if steps:
        told += [steps, _tokens(_chosen(train, ROWS * steps))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _tokens(rows: list[Row]) -> list[Any]:
    return [[row["input_ids"], row.get("token_type_ids")] for row in rows]


def fingerprint(model: Any) -> str:
    """Return hexadecimal digits of a model's body: its type, its shapes, its weights to float16.

    A copy in float16 has those of the model that it was made from.
    """
    digest = hashlib.sha256(model.config.model_type.encode())
    for name, parameter in model.base_model.named_parameters():
        # A pooler may be new, and other with every seed; nothing is fitted to it.
        if "pooler" not in name:
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().half().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class _Making:
    """A converted model whose scores are set: from the folder where it has them, else made."""

    def __init__(
        self, converted: Any, model: Any, tokenizer: Any, train: list[Any], starts: Any
    ) -> None:
        self.converted = converted
        self.model = model
        self.tokenizer = tokenizer
        self.train = train
        self.folder = None if starts is None else Path(starts)

    def kept(self, cell: Cell) -> dict[str, Any]:
        """Set the scores; return what is known of them."""
        if self.folder is None:
            return self.made(cell)
        key = start_key(cell, self.model, self.train)
        path = self.folder / f"{key}.safetensors"
        # Who comes second waits for the first, and takes what it made.
        with locked(path.with_suffix(".lock")):
            if path.exists():
                return {"key": key, **_read(path, self.converted)}
            about = self.made(cell)
            _write(path, self.converted, about)
            return {"key": key, **about}

    def made(self, cell: Cell) -> dict[str, Any]:
        """Set the scores to new ones; distilled ones begin with those that are only fitted."""
        rows = calibration_rows(cell, self.train)
        batches = batches_of(tokens_of(rows, self.model, self.tokenizer), self.model)
        steps = cell.variant.distil_steps
        if steps:
            before = self.kept(replace(cell, variant=replace(cell.variant, distil_steps=0)))
            started = time.perf_counter()
            losses = tisa.hf.distil(
                self.converted, self.model, _chosen(self.train, ROWS * steps),
                steps=steps, tokenizer=self.tokenizer, progress=lambda told: None,
            )  # fmt: skip
            seconds = before["seconds"] + time.perf_counter() - started
            found = {"loss": [round(losses[0], 5), round(losses[-1], 5)]}
        else:
            started = time.perf_counter()
            left = fit_scores(self.converted, self.model, batches)
            seconds = time.perf_counter() - started
            # Of each layer: the mean of its heads' divergences from the original's attention.
            found = {"divergence": [round(float(layer.mean()), 5) for layer in left]}
        where = surroundings("", self.model.device)
        return {
            "model": cell.model,
            "task": cell.task,
            "start": cell.variant.unfrozen().label,
            "rows": len(rows),
            "seconds": round(seconds, 2),
            **found,
            "cosine": round(_cosine(self.converted, self.model, batches), 5),
            **{name: where[name] for name in ("date", "commit", "device", "torch")},
        }


def _cosine(converted: Any, model: Any, batches: list[Batch]) -> float:
    """Return the mean cosine of both models' mean last hidden states, on what was fitted on."""
    found = []
    modes = converted.training, model.training
    converted.eval()
    model.eval()
    with torch.no_grad():
        for batch in batches:
            weight = batch.inputs["attention_mask"].unsqueeze(-1).float()
            ours, theirs = (
                (m.base_model(**batch.inputs).last_hidden_state.float() * weight).sum(1)
                for m in (converted, model)
            )
            found.append(cosine_similarity(ours, theirs, dim=-1))
    converted.train(modes[0])
    model.train(modes[1])
    return float(torch.cat(found).mean())


def _scores(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if is_score(name)}


def _read(path: Path, converted: Any) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = opened(json.loads((file.metadata() or {})["tisa"]), str(path), remedy=AGAIN)
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as wrong:
        raise Damaged(f"{path}: not a start of `tisa-lab glue` ({wrong}); {AGAIN}") from wrong
    # Starts of before have no checksum.
    if about.pop("tensors", None) not in (None, tensors_digest(kept)):
        raise Damaged(f"{path}: not as it was written, its checksum is another one; {AGAIN}")
    wanted = _scores(converted)
    if {n: t.shape for n, t in kept.items()} != {n: t.shape for n, t in wanted.items()}:
        raise Damaged(f"{path}: the scores are of another model; {AGAIN}")
    for name, value in kept.items():
        wanted[name].copy_(value)
    return about


def _write(path: Path, converted: Any, about: dict[str, Any]) -> None:
    """Write all of it or nothing: the name is given to a file that is on the disk."""
    kept = {name: value.cpu().contiguous() for name, value in _scores(converted).items()}
    told = sealed(about | {"tensors": tensors_digest(kept)})
    content = save(kept, {"tisa": json.dumps(told)})
    try:
        write_bytes(path, content)
    except OSError as full:
        raise OSError(
            full.errno, f"{path}: {full.strerror}; make room for what cells start from, and go on"
        ) from full
