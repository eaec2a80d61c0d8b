"""`tisa-lab extrapolate`: trained models read past their training length."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any


def command(
    runs: list[Path],
    /,
    *,
    data: str,
    lengths: str = "512,1024,2048,4096,8192",
    out: Path | None = None,
    stride: int = 256,
    modes: str = "whole,sliding",
    max_tokens: int | None = None,
    batch_tokens: int = 32768,
    split: str = "blank",
    text_column: str = "text",
    bf16: bool = False,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Measure the loss by length and by position, past the training length too.

    On whole documents that fill the longest window; every token counts once at every length.

    Example: `tisa-lab extrapolate tisa alibi --data valid.txt --lengths 512,1024 --out far`

    Args:
        runs: Folders of finished `tisa-lab pretrain` runs.
        data: Documents: a text file, or a prepared folder.
        lengths: Tokens in a window, with commas.
        out: Folder for extrapolation.json, .md and .png.
        stride: Of the sliding windows.
        modes: whole (no overlap), sliding.
        max_tokens: Enough tokens to measure on.
        batch_tokens: Read at once.
        split: As in `tisa-lab pretrain`.
        text_column: As in `tisa-lab pretrain`.
        bf16: bfloat16 products.
        device: cpu or cuda; by default a GPU where there is one.
        as_json: Print the record.
    """
    import torch

    from tisa.cli.device import checked
    from tisa_lab.criteria.figure import require_matplotlib
    from tisa_lab.extrapolation.measuring import (
        check_vocabulary,
        measured,
        own_tokenizer,
        run_folder,
    )
    from tisa_lab.extrapolation.report import write
    from tisa_lab.extrapolation.tables import markdown
    from tisa_lab.extrapolation.windows import long_documents
    from tisa_lab.pretrain.corpus import head
    from tisa_lab.pretrain.opening import opened
    from tisa_lab.pretrain.summary import label_of
    from tisa_lab.record import command_line, surroundings

    wanted = _numbers(lengths)
    # Each once: rows of a mode that was measured twice would be taken for seeds.
    chosen: Any = tuple(dict.fromkeys(p.strip() for p in modes.split(",") if p.strip()))
    if not chosen or not set(chosen) <= {"whole", "sliding"}:
        raise ValueError(f"--modes: expected whole and sliding with commas, got {modes!r}")
    if stride < 1:
        raise ValueError(f"--stride: expected at least 1, got {stride}")
    checked(device)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # What is wrong with any of them is said before the first is measured.
    loaded = [run_folder(folder) for folder in runs]
    named = None if Path(data).is_dir() else own_tokenizer(runs[0])
    corpus, _ = opened([data], None, named, split, text_column)
    for folder, (_, _, fingerprint) in zip(runs, loaded, strict=True):
        check_vocabulary(folder, fingerprint, corpus)
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
    documents = long_documents(
        head(corpus, 10**12), max(wanted), max_tokens, is_causal=objectives == {"causal"}
    )
    if out is not None:
        # Before the minutes of measuring, not after them.
        require_matplotlib()
        out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "kind": "extrapolation",
        "trained_at": trained_at.pop(),
        "objective": loaded[0][1]["objective"],
        "stride": stride,
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "runs": [],
        "surroundings": surroundings(command_line(), place),
    }
    for folder, (model, config, _) in zip(runs, loaded, strict=True):
        label = label_of(config)
        rows = measured(
            model.to(place), documents, corpus.vocabulary, wanted, stride=stride, modes=chosen,
            batch_tokens=batch_tokens, bf16=bf16,
            progress=partial(_tell, label),
        )  # fmt: skip
        model.cpu()
        record["runs"].append(
            {"label": label, "folder": folder.name, "seed": config["seed"], "rows": rows}
        )
    if out is not None:
        write(record, out)
    print(json.dumps(record, ensure_ascii=False, allow_nan=False) if as_json else markdown(record))


def _tell(name: str, line: str) -> None:
    print(f"{name}: {line}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 3:
        raise ValueError(f"--lengths: expected numbers from 3 on with commas, got {text!r}")
    return found
