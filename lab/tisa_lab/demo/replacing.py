"""Chapters 3 to 6: positions removed, replaced by fitted kernels, distilled, and read."""

import io
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

import tisa.hf
from tisa.hf.default_text import SENTENCES
from tisa.hf.families import reason_against
from tisa.hf.registry import base_class, config_of, proved, tokenizer_of
from tisa.hf.report import curves_of, peak_of
from tisa.parameters import is_score
from tisa.store import read_bytes, write_sealed
from tisa.weights import read_checkpoint
from tisa_lab.demo.measuring import Yardstick
from tisa_lab.demo.moving import move
from tisa_lab.demo.sentences import TRAINING
from tisa_lab.demo.settings import AGAIN, Settings

REACH = 24
# A head whose scores differ by less than this hardly tells places apart: odds of e to 1.
CARES = 1


class Replacing:
    """One model and what becomes of its positions; kernels are kept in `folder`."""

    def __init__(self, model: Path, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        checkpoint = read_checkpoint(model)
        config = config_of(checkpoint)
        config.name_or_path = str(model)
        self.tokenizer = tokenizer_of(model)
        if self.tokenizer.pad_token is None:
            raise ValueError(
                "model: sentences are read side by side, and this model's tokenizer has no token "
                "to fill the shorter ones up; take an encoder such as BERT"
            )
        loaded = proved(base_class(config, checkpoint), config, checkpoint, dtype=torch.float32)
        self.original: PreTrainedModel = loaded.eval().to(settings.device)
        reason = reason_against(self.original, "replace")
        if reason is not None:
            raise ValueError(f"model: its positions cannot be replaced: {reason}")

    @cached_property
    def yardstick(self) -> Yardstick:
        """The original's vectors."""
        return Yardstick(self.original, self.tokenizer, self.settings)

    @property
    def texts(self) -> list[str]:
        """Sentences to fit on; what is measured is not among them."""
        both = [text for pair in zip(TRAINING, SENTENCES, strict=False) for text in pair]
        both += TRAINING[len(SENTENCES) :]
        return both[: self.settings.fit_texts]

    def about(self) -> dict[str, Any]:
        """Return the model's sizes."""
        config = self.original.config
        return {
            "class": type(self.original).__name__,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "width": config.hidden_size,
            "parameters": sum(p.numel() for p in self.original.parameters()),
        }

    def remove(self) -> dict[str, Any]:
        """Return what is left without the table, and with one mean vector in its place."""
        zeroed = tisa.hf.convert(self.original, positions="replace", init="zero", fold=False)
        return {
            "original": self.yardstick.measure(self.original),
            "zeroed": self.yardstick.measure(zeroed),
            "mean": self.yardstick.measure(self._converted("zero")),
            "sentences": len(self.yardstick.orders),
            "pairs": self.yardstick.pairs,
        }

    def fit(self, progress: Callable[[float], None]) -> dict[str, Any]:
        """Return what comes back with kernels fitted to the model's own heads."""
        fitted = self._converted("fit", lambda at, of: progress(at / of))
        self._keep(fitted, "fitted.pt")
        kernels = sum(p.numel() for n, p in fitted.named_parameters() if "offset_scores" in n)
        vectors = sum(p.numel() for n, p in fitted.named_parameters() if n.endswith(".fold"))
        return self.yardstick.measure(fitted) | {
            "texts": len(self.texts),
            "kernels": self.settings.num_kernels,
            "replaced": fitted.config.tisa["replaced_parameters"],
            "numbers": kernels,
            "vectors": vectors,
        }

    def distil(self, progress: Callable[[float], None]) -> dict[str, Any]:
        """Return what comes back when the kernels learn from the original for some steps."""
        student = self._with("fitted.pt")
        generator = Random(self.settings.seed)
        # Shuffled sentences too: what the original makes of other orders is to be learned.
        shuffled = [" ".join(generator.sample(t.split(), len(t.split()))) for t in self.texts]
        steps = self.settings.distil_steps
        losses = tisa.hf.distil(
            student, self.original, self.texts + shuffled, tokenizer=self.tokenizer, steps=steps,
            seed=self.settings.seed, checkpoint=self.folder / "distilling.pt",
            progress=lambda told: progress(told.step / steps),
        )  # fmt: skip
        self._keep(student, "distilled.pt")
        return self.yardstick.measure(student) | {
            "steps": len(losses),
            "losses": [round(loss, 6) for loss in losses],
        }

    def read(self) -> dict[str, Any]:
        """Return every head's curve f(k) after distillation, and what it says."""
        heads: list[dict[str, Any]] = []
        for layer, curves in enumerate(curves_of(self._with("distilled.pt"), REACH)):
            for head, curve in enumerate(curves):
                heads.append(
                    {
                        "layer": layer + 1,
                        "head": head + 1,
                        "peak": peak_of(curve),
                        "spread": round(float(curve.max() - curve.min()), 3),
                        "values": [round(float(v), 3) for v in curve],
                    }
                )
        caring = [head for head in heads if head["spread"] >= CARES]
        return {
            "reach": REACH,
            "heads": heads,
            "count": len(heads),
            "caring": len(caring),
            "before": sum(head["peak"] == -1 for head in caring),
            "after": sum(head["peak"] == 1 for head in caring),
            "near": sum(head["peak"] in range(-3, 4) for head in caring),
            "threshold": CARES,
        }

    def move(self) -> dict[str, Any] | None:
        """Return attention inside a phrase that moves, with the table and after distillation."""
        return move(self.original, self._with("distilled.pt"), self.tokenizer)

    def _converted(
        self, init: Any, progress: Callable[[int, int], None] | None = None
    ) -> PreTrainedModel:
        return tisa.hf.convert(
            self.original, positions="replace", init=init, calibration=self.texts,
            num_kernels=self.settings.num_kernels, tokenizer=self.tokenizer, progress=progress,
        ).eval()  # fmt: skip

    def _keep(self, made: PreTrainedModel, name: str) -> None:
        content = io.BytesIO()
        torch.save(_scores(made), content)
        write_sealed(self.folder / name, {"kind": "kernels"}, content.getvalue())

    def _with(self, name: str) -> PreTrainedModel:
        """Return the converted model with kernels that an earlier chapter kept."""
        made = self._converted("zero")
        _, content = read_bytes(self.folder / name, remedy=AGAIN)
        place = self.settings.device
        kept = torch.load(io.BytesIO(content), weights_only=True, map_location=place)
        missing, unexpected = made.load_state_dict(kept, strict=False)
        assert not unexpected, unexpected
        assert not any(is_score(key) for key in missing), missing
        return made


def _scores(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the kernels and folded vectors of a converted model."""
    return {n: p.detach().cpu() for n, p in model.named_parameters() if is_score(n)}


def given_back(found: float, removed: float, original: float) -> float | None:
    """Return which share of what removing the positions cost is back; None if it cost nothing."""
    lost = original - removed
    return None if lost <= 0 else (found - removed) / lost
