"""`tisa-lab pretrain`: masked or causal language models with any position methods."""

import json
import signal
from pathlib import Path
from typing import Any

from tisa.store import check_new_folder
from tisa_lab.evaluation.asked import Asked
from tisa_lab.executors import Place
from tisa_lab.pretrain.config import RECORDS, Grid, RunSettings
from tisa_lab.pretrain.corpus import CorpusNames

GRID, SETTINGS, NAMES, HERE, NOTHING = Grid(), RunSettings(), CorpusNames(), Place(), Asked()


def command(
    *,
    names: CorpusNames = NAMES,
    valid: str | None = None,
    out: Path | None = None,
    grid: Grid = GRID,
    settings: RunSettings = SETTINGS,
    place: Place = HERE,
    asked: Asked = NOTHING,
    prepare: Path | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Pretrain a language model with any position method, or a grid of them.

    Packed rows without attention between documents; goes on after any interruption; under
    `torchrun` or `accelerate launch` on several processes. OUT/model is the model, OUT/record.json
    the numbers. Several methods, rates or seeds are a grid: a folder in OUT for each run, and
    OUT/records.jsonl with a line for each finished one, which is not repeated.

    Examples: `tisa-lab pretrain --data train.txt --tokenizer bytes --out run`,
    `tisa-lab pretrain --data wiki.txt.xz --tokenizer spiece.model --prepare wiki`,
    `accelerate launch -m tisa_lab.cli pretrain --data wiki --position rotary --bf16 --out rotary`,
    `tisa-lab pretrain --data wiki --position tisa,alibi --learning-rate 1e-3,2e-3 --seeds 3
    --executor pool --workers 6 --out grid`,
    `tisa-lab pretrain --data wiki --valid wiki-valid --objective causal --out run
    --evaluate blimp,windows,recall --blimp blimp.json.xz`

    Args:
        names: The corpus.
        grid: The recipe, and what is compared with it.
        settings: How it is carried out.
        valid: Held-out documents: a file or a prepared folder.
        out: Folder of the run, or of the grid.
        place: Where the runs of a grid are done; a Ray cluster must share the folder.
        asked: What every trained model is asked before its run ends.
        prepare: Only cut the corpus into tokens, into this folder, for --data.
        min_tokens: With --prepare: no shorter documents.
        max_tokens: With --prepare: only documents below it.
        as_json: Print the record, or the records of the grid.
        dry_run: Check everything, print the plan, train nothing.
    """
    from tisa_lab.pretrain.checkpoints import check_run
    from tisa_lab.pretrain.model import check_corpora, check_settings, is_first_process, plan
    from tisa_lab.pretrain.training import identity_of, run
    from tisa_lab.record import command_line
    from tisa_lab.view import view_for

    if prepare is not None:
        made = names.prepare(prepare, min_tokens=min_tokens, max_tokens=max_tokens)
        count, tokens = len(made.ends), int(made.ends[-1])
        found = {"documents": count, "tokens": tokens, "folder": str(prepare)}
        line = f"{count:,} documents, {tokens:,} tokens in {prepare}"
        print(json.dumps(found) if as_json else line)
        return
    if out is None:
        raise ValueError("out: expected the folder of the run, got none")
    check_new_folder(out, own=("run.json", ".lock", "claims", RECORDS))
    configs = grid.configs()
    corpus, save_tokenizer = names.open()
    held_out = None if valid is None else names.beside(valid)
    check_settings(settings)
    check_corpora(grid, corpus, held_out)
    evaluate = None
    if asked.evaluate:
        from tisa_lab.evaluation.evaluating import Evaluation

        evaluate = Evaluation(asked, names)
        evaluate.check(grid, held_out, corpus.vocabulary)
    several = len(configs) > 1 or place.executor != "in-process" or (out / RECORDS).exists()
    if dry_run:
        from tisa_lab.pretrain.grid import Run

        lines = plan(configs[0], corpus, settings)
        for config in configs:
            key = Run(config).key
            check_run(out / key if several else out,
                      identity_of(config, corpus, held_out, settings, evaluate))  # fmt: skip
            lines += [f"run {key}"] * several
        print(json.dumps(lines, ensure_ascii=False) if as_json else "\n".join(lines))
        return
    first = several or is_first_process(settings)
    with _Stopping() as stopping, view_for(shown=first) as view:
        if several:
            from tisa_lab.pretrain.grid import run_grid

            failed: Any = run_grid(
                configs, out, names, valid=valid, settings=settings, place=place, view=view,
                command=command_line(), stop=stopping, evaluate=evaluate,
            )  # fmt: skip
            lines = (out / RECORDS).read_text().splitlines() if (out / RECORDS).exists() else []
            shown = f"[{','.join(lines)}]"
        else:
            record = run(
                configs[0], corpus, out, valid=held_out, settings=settings, view=view,
                command=command_line(), stop=stopping, save_tokenizer=save_tokenizer,
                evaluate=evaluate,
            )  # fmt: skip
            failed = record is not None and "diverged" in record
            shown = "" if record is None else json.dumps(record, ensure_ascii=False)
    if as_json and first and shown:
        print(shown)
    if stopping.asked == signal.SIGINT:
        raise SystemExit(130)
    if failed:
        raise SystemExit(1)


class _Stopping:
    """Whether Ctrl-C was pressed or the job was told to end; a second time ends it at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked: int | None = None

    def __enter__(self) -> "_Stopping":
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.asked is not None
