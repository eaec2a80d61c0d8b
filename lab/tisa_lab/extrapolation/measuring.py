"""A trained model in, its loss by length and by position out.

Windows are packed, so that the fused kernels read them without a tensor of queries × keys. What a
method cannot do (a table of positions that ends, too little memory) is in the result with its
reason.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from tisa.packages import device_named
from tisa.positions import resolve
from tisa.store import read_json
from tisa.transformer import LanguageModel, load
from tisa_lab.extrapolation.readings import readings_of
from tisa_lab.extrapolation.windows import Mode, Window, long_documents, windows_of
from tisa_lab.pretrain.batches import uniform
from tisa_lab.pretrain.checkpoints import AGAIN, MODEL, RECORD, RUN
from tisa_lab.pretrain.corpus import Corpus, CorpusNames, head
from tisa_lab.pretrain.report import label_of
from tisa_lab.pretrain.text import Split, Vocabulary
from tisa_lab.record import surroundings

Documents = list[npt.NDArray[np.unsignedinteger]]
SEED, MASK_SHARE, LOGITS_AT_ONCE = 20210601, 0.15, 4096


def extrapolated(
    runs: list[Path],
    *,
    data: str,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192),
    modes: tuple[Mode, ...] = ("whole", "sliding"),
    stride: int = 256,
    max_tokens: int | None = None,
    batch_tokens: int = 32768,
    split: Split = "blank",
    text_column: str = "text",
    bf16: bool = False,
    position: tuple[str, ...] = (),
    reading: tuple[str, ...] = (),
    device: str | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the record: the loss of finished runs by length and by position.

    On whole documents that fill the longest window; every token counts once at every length.

    Args:
        runs: Folders of finished `tisa-lab pretrain` runs.
        data: Documents: a text file, or a prepared folder.
        lengths: Tokens in a window.
        modes: Windows without overlap (whole), or sliding.
        stride: Tokens from one sliding window to the next.
        max_tokens: Enough tokens to measure on.
        batch_tokens: Tokens read at once.
        split: What ends a document in a text file: a blank line, any line, the file.
        text_column: Of Parquet files.
        bf16: Products in bfloat16.
        position: Methods of your own that runs were trained with, as my_file.py:Class.
        reading: Other options that runs of that method are read with too, as in
            rotary:scaling=yarn (by default to the longest length).
        device: By default a GPU where there is one.
        command: For the record.
        progress: Told a line for each length and mode.
    """
    # Each once: rows of a mode that was measured twice would be taken for seeds.
    lengths, modes = tuple(sorted(set(lengths))), tuple(dict.fromkeys(modes))
    if not lengths or lengths[0] < 3:
        raise ValueError(f"lengths must be whole numbers from 3 on, got {lengths}")
    if not modes or not set(modes) <= {"whole", "sliding"}:
        raise ValueError(f"modes must be whole and sliding, got {modes}")
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    place = device_named(device)
    # Known from here on: a saved model's own word is no reason to run a file.
    for name in position:
        resolve(name)
    # What is wrong with any of them is said before the first is measured.
    loaded = [run_folder(folder) for folder in runs]
    tokenizer = None if Path(data).is_dir() else str(runs[0] / MODEL)
    names = CorpusNames([data], tokenizer=tokenizer, split=split, text_column=text_column)
    corpus, _ = names.open()
    objective, trained_at = _alike(runs, loaded, corpus)
    read = readings_of(runs, loaded, reading, trained_at, lengths[-1])
    documents = long_documents(
        head(corpus, 10**12), lengths[-1], max_tokens, is_causal=objective == "causal"
    )
    record: dict[str, Any] = {
        "kind": "extrapolation",
        "trained_at": trained_at,
        "objective": objective,
        "stride": stride,
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "runs": [],
        "surroundings": surroundings(command, place),
    }
    for folder, model, config in read:
        label = label_of(config)

        def tell(line: str, label: str = label) -> None:
            progress(f"{label}: {line}")

        rows = measured(
            model.to(place), documents, corpus.vocabulary, list(lengths), stride=stride,
            modes=modes, batch_tokens=batch_tokens, bf16=bf16, progress=tell,
        )  # fmt: skip
        model.cpu()
        record["runs"].append(
            {"label": label, "folder": folder.name, "seed": config["seed"], "rows": rows}
        )
    return record


def run_folder(folder: Path) -> tuple[LanguageModel, dict[str, Any], str]:
    """Return the model of a finished run, its config, and its tokenizer's fingerprint."""
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(
            f"{folder}: expected the folder of a finished `tisa-lab pretrain`, got no {RECORD}"
        )
    record = read_json(folder / RECORD, remedy=AGAIN)
    if "diverged" in record:
        raise ValueError(
            f"{folder}: expected a trained model, got a run whose loss became no number at step "
            f"{record['diverged']['step']:,}; leave it out"
        )
    model = load(folder / MODEL)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{folder / MODEL}: expected a language model, got a transformer alone")
    return model, record["config"], read_json(folder / RUN, remedy=AGAIN)["tokenizer"]


def _alike(
    runs: list[Path], loaded: list[tuple[LanguageModel, dict[str, Any], str]], corpus: Corpus
) -> tuple[str, int]:
    """Return the objective and the training length of all runs; refuse what is not comparable."""
    own = corpus.vocabulary
    for folder, (_, _, fingerprint) in zip(runs, loaded, strict=True):
        if own.fingerprint != fingerprint:
            raise ValueError(
                f"{folder} was trained with the tokenizer {fingerprint}, the documents were cut "
                f"with {own.name!r} ({own.fingerprint}); give them as text, or prepare them with "
                "the model's"
            )
    objectives = {config["objective"] for _, config, _ in loaded}
    if len(objectives) > 1:
        raise ValueError("runs: expected masked or causal language models, got both")
    trained_at = {max(length for length, _ in config["lengths"]) for _, config, _ in loaded}
    if len(trained_at) > 1:
        raise ValueError(
            "runs: expected models trained at one length, got "
            f"{', '.join(map(str, sorted(trained_at)))}; measure each length on its own"
        )
    seen: dict[tuple[str, int], Path] = {}
    for folder, (_, config, _) in zip(runs, loaded, strict=True):
        other = seen.setdefault((label_of(config), config["seed"]), folder)
        if other != folder:
            raise ValueError(
                f"runs: {other} and {folder} are of the same method and seed, and would be "
                "averaged as if they were seeds; measure each on its own"
            )
    return objectives.pop(), trained_at.pop()


def measured(
    model: LanguageModel,
    documents: Documents,
    vocabulary: Vocabulary,
    lengths: list[int],
    *,
    stride: int = 256,
    modes: tuple[Mode, ...] = ("whole", "sliding"),
    batch_tokens: int = 32768,
    bf16: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Return one row for each length and mode: loss, perplexity, loss by position, memory.

    A loss that is no number is None.
    """
    rows = []
    for length in lengths:
        for mode in modes:
            row: dict[str, Any] = {"length": length, "mode": mode}
            began = time.monotonic()
            device = next(model.parameters()).device
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                row |= _losses(
                    model, documents, vocabulary, length, mode, stride, batch_tokens, bf16
                )
            except ValueError as refused:
                if "max_position_embeddings" not in str(refused):
                    raise
                row["refused"] = str(refused)
            except torch.cuda.OutOfMemoryError:
                row["refused"] = "out of GPU memory"
                torch.cuda.empty_cache()
            row["seconds"] = time.monotonic() - began
            if device.type == "cuda":
                row["peak_memory"] = torch.cuda.max_memory_allocated(device)
            told = "refused"
            if "refused" not in row:
                told = f"perplexity {row['perplexity'] or math.nan:.2f}"
            progress(f"{mode} {length:,}: {told}")
            rows.append(row)
    return rows


@torch.no_grad()
def _losses(
    model: LanguageModel,
    documents: Documents,
    vocabulary: Vocabulary,
    length: int,
    mode: Mode,
    stride: int,
    batch_tokens: int,
    bf16: bool,
) -> dict[str, Any]:
    is_causal = model.config.is_causal
    cut = windows_of([len(d) for d in documents], length, mode, stride=stride, is_causal=is_causal)
    shown, wanted = _shown(documents, vocabulary, is_causal)
    edges = position_bins(length)
    sums = np.zeros((len(edges) - 1, 2))
    at_once = max(1, batch_tokens // length)
    device = next(model.parameters()).device
    for first in range(0, len(cut), at_once):
        some = cut[first : first + at_once]
        ids, ends, places, labels, positions = packed(some, shown, wanted, vocabulary, is_causal)
        if not len(places):
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden = model.transformer(
                ids.to(device), cu_seqlens=ends.to(device), max_seqlen=length
            )[places.to(device)]
            found = torch.cat(
                [
                    cross_entropy(model.head(h).float(), label, reduction="none")
                    for h, label in zip(
                        hidden.split(LOGITS_AT_ONCE),
                        labels.to(device).split(LOGITS_AT_ONCE),
                        strict=True,
                    )
                ]
            )
        values = found.double().cpu().numpy()
        bins = np.searchsorted(edges, positions, side="right") - 1
        np.add.at(sums[:, 0], bins, values)
        np.add.at(sums[:, 1], bins, 1)
    loss = float(sums[:, 0].sum() / sums[:, 1].sum())
    return {
        "loss": _number(loss),
        "perplexity": _number(math.exp(min(loss, 700.0))),
        "tokens": int(sums[:, 1].sum()),
        "by_position": [
            [int(start), int(end), _number(total / count), int(count)]
            for start, end, (total, count) in zip(edges[:-1], edges[1:], sums, strict=True)
            if count
        ],
    }


def _number(value: float) -> float | None:
    """Return it as JSON knows it: None where a model has broken down."""
    return float(value) if math.isfinite(value) else None


def _shown(
    documents: Documents, vocabulary: Vocabulary, is_causal: bool
) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.bool_]]]:
    """Return what the model is shown of each document, and which of its tokens count.

    All of them in a causal model; in a masked one the same masked ones at any length.
    """
    shown, wanted = [], []
    for number, document in enumerate(documents):
        tokens = document.astype(np.int64)
        if is_causal:
            wanted.append(np.ones(len(tokens), bool))
        else:
            wanted.append(uniform(len(tokens), SEED, number) < MASK_SHARE)
        shown.append(tokens)
    return shown, wanted


def packed(
    some: list[Window],
    documents: list[npt.NDArray[np.int64]],
    wanted: list[npt.NDArray[np.bool_]],
    vocabulary: Vocabulary,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
    """Return tokens, ends, places to read, labels and the labels' positions in their windows."""
    special = vocabulary.specials
    ids, ends, places, labels, positions = [], [0], [], [], []
    for window in some:
        text = documents[window.document][window.start : window.stop]
        counted = np.zeros(len(text), bool)
        counted[window.first - window.start : window.last - window.start] = True
        counted &= wanted[window.document][window.start : window.stop]
        chosen = np.flatnonzero(counted)
        labels.append(text[chosen])
        positions.append(chosen + 1)
        if is_causal:
            # A token is predicted from the place before it.
            seen, asked = text, chosen
        else:
            masked = wanted[window.document][window.start : window.stop]
            assert special.mask is not None
            hidden = np.where(masked, special.mask, text)
            seen, asked = np.append(hidden, special.end), chosen + 1
        places.append(asked + ends[-1])
        ids.append(np.concatenate(([special.begin], seen)))
        ends.append(ends[-1] + len(seen) + 1)
    return (
        torch.from_numpy(np.concatenate(ids)),
        torch.tensor(ends, dtype=torch.int32),
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(labels)),
        np.concatenate(positions),
    )


def position_bins(length: int) -> npt.NDArray[np.int64]:
    """Return ends of bins of positions: powers of two from 16 on, quarters of them from 512 on."""
    edges, at = [0, 16], 16
    while at < length:
        at += at if at < 256 else max(128, 2 ** (at.bit_length() - 3))
        edges.append(min(at, length))
    return np.array(edges)
