"""`tisa-lab extrapolate`: trained models read past their training length."""

import json
import sys
from pathlib import Path


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
        out: Folder for index.html, extrapolation.json, .md and .png.
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
    from tisa.packages import needed
    from tisa_lab.extrapolation.measuring import extrapolated
    from tisa_lab.extrapolation.report import markdown, write
    from tisa_lab.record import command_line

    if out is not None:
        # Before the minutes of measuring, not after them.
        needed("matplotlib", "figures", "tisa-lab")
        out.mkdir(parents=True, exist_ok=True)
    record = extrapolated(
        runs, data=data, lengths=_numbers(lengths), stride=stride, max_tokens=max_tokens,
        modes=tuple(p.strip() for p in modes.split(",") if p.strip()),  # type: ignore[misc]
        batch_tokens=batch_tokens, split=split, text_column=text_column, bf16=bf16,  # type: ignore[arg-type]
        device=device, command=command_line(), progress=_tell,
    )  # fmt: skip
    if out is not None:
        write(record, out)
    print(json.dumps(record, ensure_ascii=False, allow_nan=False) if as_json else markdown(record))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--lengths: expected whole numbers, got {text!r}") from None
