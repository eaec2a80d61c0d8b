"""`tisa-lab glue`: the paper's Table 3, cell by cell."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def command(
    model: str,
    /,
    *,
    out: Path,
    tasks: str = "sst-2,mnli,qqp,sts-b,cola,mrpc,qnli,rte",
    data_dir: Path | None = None,
    kernels: str = "0,1,3,5",
    positions: str = "keep,replace",
    init: str = "reference",
    fold: str = "no",
    frozen: str = "no",
    distil: str = "0",
    rows: str = "",
    seeds: int = 5,
    seed: int = 0,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    scores_learning_rate: float | None = None,
    warmup: float | None = None,
    dropout: float | None = None,
    max_length: int | None = None,
    train_rows: int | None = None,
    evaluations: int | None = None,
    batches: str = "padded",
    executor: str = "in-process",
    workers: int = 2,
    address: str | None = None,
    stack: int = 32,
    device: str | None = None,
    only_starts: bool = False,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Fine-tune a model on GLUE with and without TISA: the cells of Table 3.

    Writes a line to OUT/records.jsonl for each finished run. Interrupt it, kill it, start it again,
    start it twice: every cell is run once. `tisa-lab report OUT` makes the table.

    Examples: `tisa-lab glue albert-base-v2 --out table3`,
    `tisa-lab glue MODEL --tasks cola,rte --data-dir glue --seeds 3 --epochs 3 --out few --dry-run`

    Args:
        model: Folder or name on the hub; several with commas.
        out: Folder of the records; what is in it is not repeated.
        tasks: Tasks, with commas between them.
        data_dir: Folder of official GLUE files; by default the hub.
        kernels: S, kernels per head.
        positions: keep: with position embeddings (a); replace: without (b).
        init: How kernels start: reference (random), zero, fit.
        fold: What replaces removed positions: no (nothing), yes (their means).
        frozen: Fitted kernels: no (trained), yes (not).
        distil: Steps towards the original, after the fit, before training.
        rows: Rows of the table by name, with ; between, instead of all these.
        seeds: How many seeds, from --seed on.
        seed: The first of the seeds.
        steps: Instead of the recipe's.
        epochs: Instead of steps.
        batch_size: Instead of the recipe's.
        learning_rate: Instead of the recipe's.
        scores_learning_rate: Of the kernels; by default ten times the other.
        warmup: A share of the steps.
        dropout: Instead of the recipe's.
        max_length: Tokens; 512 by default.
        train_rows: Only the first so many training rows.
        evaluations: On the dev set; 4 by default.
        batches: padded: of similar length; packed: no padding at all.
        executor: in-process; pool: several processes (--workers); stacked: many cells side by side
            as one batched model (--stack); ray: on a cluster (--address, --workers).
        workers: Processes of the pool, cells at a time on the cluster.
        address: Of a Ray cluster: host:port, auto; by default one on this machine.
        stack: Cells side by side, at most.
        device: cpu or cuda; by default a GPU where there is one.
        only_starts: Fit what cells start from, and train nothing.
        as_json: Print the records of these cells (or the plan) as JSON.
        dry_run: Print what would be run, and its cost.
    """
    from dataclasses import replace
    from functools import partial

    from rich.console import Console

    from tisa_lab.executors import InProcess, Leading, OnRay, Pool, follow, is_leader
    from tisa_lab.glue.cell import grid
    from tisa_lab.glue.live import LiveView
    from tisa_lab.glue.plan import plan
    from tisa_lab.glue.record import Record
    from tisa_lab.glue.stacked import Stacked, check_stackable, stacks
    from tisa_lab.glue.training import Runner, started_as, where_to
    from tisa_lab.sweep import Records, sweep

    if executor not in ("in-process", "pool", "stacked", "ray"):
        raise ValueError(f"--executor: expected in-process, pool, stacked or ray, got {executor!r}")
    if address is not None and executor != "ray":
        raise ValueError(f"--address is for --executor ray, got --executor {executor}")
    if workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {workers}")
    if stack < 1:
        raise ValueError(f"--stack: expected at least 1, got {stack}")
    if batches not in ("padded", "packed"):
        raise ValueError(f"--batches: expected padded or packed, got {batches!r}")
    if batches == "packed" and executor == "stacked":
        raise ValueError("--batches packed: --executor stacked has batches of its own")
    processes = started_as()
    if processes > 1 and executor != "in-process":
        raise ValueError(
            f"started as {processes} processes (torchrun, accelerate launch), each cell is run "
            f"by all of them: expected --executor in-process, got {executor}"
        )
    if seeds < 1:
        raise ValueError(f"--seeds: expected at least 1, got {seeds}")
    recipe: dict[str, Any] = dict(
        steps=steps, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
        scores_learning_rate=scores_learning_rate, max_length=max_length, train_rows=train_rows,
        evaluations=evaluations, warmup=warmup, dropout=dropout, batches=batches,
    )  # fmt: skip
    if steps is not None and epochs is not None:
        raise ValueError("--steps and --epochs: expected one of them, got both")
    for option, given in (("MODEL", model), ("--tasks", tasks)):
        if not _parts(given):
            raise ValueError(f"{option}: expected names with commas between them, got {given!r}")
    # A shell that completes a folder's name adds a slash: the same model, and the same cells.
    models = [part.rstrip("/") or part for part in _parts(model)]
    cells = grid(
        models,
        _parts(tasks),
        kernels=_whole("--kernels", kernels),
        positions=_chosen("--positions", positions, ("keep", "replace")),
        starts=_chosen("--init", init, ("reference", "zero", "fit")),
        folds=_answers("--fold", fold),
        frozen=_answers("--frozen", frozen),
        distil=_whole("--distil", distil),
        rows=[row for row in rows.split(";") if row.strip()],
        seeds=range(seed, seed + seeds),
        **{name: value for name, value in recipe.items() if value is not None},
    )
    if not cells:
        raise ValueError(
            "no cells: --frozen yes and --distil need --init fit, and that --positions replace"
        )
    runner = Runner(data_dir, device, out / "starts")
    store = Records(out, Record)
    if processes > 1 and not is_leader(where_to(device)):
        if not (dry_run or only_starts):
            follow(runner)
        return
    # Reads data and models: what is wrong with them is said before hours are spent.
    lines = plan(cells, store.all(), runner)
    several = workers if executor in ("pool", "ray") else 1
    together = None
    if executor == "stacked":
        check_stackable(models)
        together = partial(stacks, size=stack)
    if dry_run and as_json:
        print(json.dumps([asdict(line) for line in lines]))
        return
    if dry_run:
        _print_plan(lines, several)
        if executor == "stacked":
            done = store.done()
            _print_stacks(stacks([c for c in cells if c.key not in done], stack))
        return
    if only_starts:
        made = _make_starts(cells, runner, Console(stderr=as_json))
        if as_json:
            print(json.dumps(made, ensure_ascii=False))
        return
    with LiveView(store, several, Console(stderr=True)) as view:
        seen = replace(runner, progress=view.step)
        if executor == "pool":
            place: Any = Pool(runner, workers)
        elif executor == "ray":
            use_gpu = device != "cpu"
            place = OnRay(runner, address, workers, use_gpu=use_gpu, folder=runner.starts)
        elif executor == "stacked":
            place = Stacked(seen, stack)
        elif processes > 1:
            place = Leading(seen)
        else:
            place = InProcess(seen)
        failed = sweep(cells, store, place, view, together)
    if as_json:
        keys = {cell.key for cell in cells}
        lines_of = [r.line() for r in store.all() if r.cell.key in keys]
        print(f"[{','.join(lines_of)}]")
    else:
        print(f"{len(cells) - len(failed)} of {len(cells)} cells are in {store.path}")
    if failed:
        raise SystemExit(1)


def _make_starts(cells: list[Any], runner: Any, console: Any) -> list[dict[str, Any]]:
    from dataclasses import replace

    from tisa_lab.glue.training import make_start

    fitted = dict.fromkeys(replace(c, seed=0, frozen=False) for c in cells if c.init == "fit")
    made = []
    for number, cell in enumerate(fitted, start=1):
        about = make_start(cell, runner.starts, data_dir=runner.data_dir, device=runner.device)
        assert about is not None
        made.append({"task": cell.task, **about})
        console.print(
            f"{number}/{len(fitted)} {cell.task} {about['start']}: {about['key']}, cosine to the "
            f"original {about['cosine']:.4f}, fitted in {about['seconds']:.1f} s",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    where = f"{len(fitted)} starts are in {runner.starts}"
    console.print(where, highlight=False, markup=False, soft_wrap=True)
    return made


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(option: str, text: str) -> list[int]:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option}: expected whole numbers with commas, got {text!r}")
    return [int(part) for part in parts]


def _chosen(option: str, text: str, allowed: tuple[str, ...]) -> Any:
    parts = _parts(text)
    if not parts or not set(parts) <= set(allowed):
        raise ValueError(f"{option}: expected {' and '.join(allowed)} with commas, got {text!r}")
    return parts


def _answers(option: str, text: str) -> list[bool]:
    return [part == "yes" for part in _chosen(option, text, ("no", "yes"))]


def _print_plan(lines: list[Any], workers: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from tisa_lab.glue.live import spoken
    from tisa_lab.glue.tasks import task_named

    table = Table()
    for name in ("model", "task", "cells", "done", "training rows", "steps left", "tokens left",
                 "operations", "time"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "task") else "right")
    for line in lines:
        table.add_row(
            Path(line.model).name,
            task_named(line.task).title,
            str(line.cells),
            str(line.done),
            f"{line.rows:,}",
            f"{line.steps:,}",
            f"{line.tokens / 1e6:,.2f} M",
            f"{line.flops / 1e15:,.3g} PFLOP",
            "?" if line.seconds is None else spoken(line.seconds / workers),
        )
    Console().print(table)
    left = sum(line.cells - line.done for line in lines)
    total = sum(line.flops for line in lines) / 1e15
    print(f"{left} cells to run, {total:,.3g} PFLOP (6 for each parameter and token).")
    if any(line.seconds is None for line in lines):
        print("Times are known after the first finished run in the folder.")
    elif left:
        seconds = sum(line.seconds for line in lines) / workers
        print(f"About {spoken(seconds)}, from the runs in the folder.")


def _print_stacks(made: list[Any]) -> None:
    from tisa_lab.glue.tasks import task_named

    print(f"{len(made)} stacks:")
    for stack in made:
        seeds = sorted({cell.seed for cell in stack})
        print(
            f"  {Path(stack[0].model).name} {task_named(stack[0].task).title}: {len(stack)} cells, "
            f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        )
