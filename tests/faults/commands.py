"""Every command that writes, on tiny inputs in the folder in which it is called.

`before` makes what a command needs; `action` is the command; what it leaves for good are the files
`result`. Words that begin with `tisa` or `tisa-lab` are a command line, else it is a function.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "lab" / "tests"), str(ROOT / "tests" / "hf"), str(ROOT / "tests")]

Action = str | Callable[[], None]


@dataclass(frozen=True)
class Command:
    """A command that writes.

    `read` prints what is left, which has to be the old or the new where something failed.
    `codes` are those with which it says that something was wrong: 1 where jobs of a sweep failed
    and the others are done, or where `tisa verify` found damage.
    """

    name: str
    action: Action
    result: tuple[str, ...]
    before: tuple[Action, ...] = ()
    codes: tuple[int, ...] = (2,)
    read: Action | None = None


def run(action: Action) -> None:
    """Do it as in a terminal: a mistake is one sentence and exit code 2."""
    if isinstance(action, str):
        program, *words = action.split()
        _run_program(program, words)
        return
    import tisa.cli

    try:
        action()
    except tisa.cli.program.MISTAKES as mistake:
        print(f"tisa: {tisa.cli.PROGRAM.said(mistake, [])}", file=sys.stderr)
        raise SystemExit(2) from None


def _run_program(program: str, words: list[str]) -> None:
    if program == "tisa":
        from tisa.cli import main
    else:
        from tisa_lab.cli import main
    sys.argv = [program, *words]
    main()


def corpus(seed: int = 1) -> None:
    """Write a text of some documents."""
    from little_corpus import text

    Path("corpus.txt").write_text(text(seed=seed))
    Path("valid.txt").write_text(text(seed=2, documents=12))


def glue() -> None:
    """Write a task of GLUE and a model that can read it."""
    from little_glue import make_data, make_model

    make_data(Path("glue"))
    make_model(Path("model"))


def texts() -> None:
    """Write a model and a text."""
    from little_glue import WORDS, make_model

    make_model(Path("model"))
    lines = [" ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(9)) for i in range(16)]
    Path("text.txt").write_text("\n".join(lines))


def articles() -> None:
    """Write a model, and articles of many sentences."""
    from little_glue import WORDS, make_model

    make_model(Path("model"))
    made = [
        " ".join(
            " ".join(WORDS[(n * i + 5 * i + 3 * j) % len(WORDS)] for j in range(9)).capitalize()
            + "."
            for i in range(30)
        )
        for n in range(44)
    ]
    Path("valid.txt").write_text("\n\n".join(made))


def transformer(seed: int) -> None:
    """Save a transformer of ours over the one that lies there."""
    import torch

    import tisa

    torch.manual_seed(seed)
    sizes = dict(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    config = tisa.transformer.TransformerConfig(**sizes)
    tisa.transformer.save(tisa.transformer.LanguageModel(config), "saved")


def converted(seed: int) -> None:
    """Save a converted model over the one that lies there."""
    import torch

    import tisa
    from tiny import original, shake

    torch.manual_seed(seed)
    model = tisa.hf.convert(original("bert"), positions="keep", init="zero")
    tisa.hf.save(shake(model, scale=seed + 1.0), "saved")


def printed_model(folder: str) -> Callable[[], None]:
    """Return what prints a saved transformer."""

    def read() -> None:
        import tisa

        model = tisa.transformer.load(folder)
        print(json.dumps([model.config.to_dict(), digest_of(model)]))

    return read


def digest_of(model: object) -> str:
    """Return the checksum of a model's tensors."""
    from tisa.store import tensors_digest

    return tensors_digest(model.state_dict())  # type: ignore[attr-defined]


def printed_converted() -> None:
    """Print a converted model."""
    import torch

    import tisa
    from tiny import inputs

    model = tisa.hf.load("saved").eval()
    with torch.no_grad():
        found = model(**inputs()).logits.double().sum().item()
    print(json.dumps([digest_of(model), found]))


def distilled(seed: int = 0, progress: Callable[[Any], None] = lambda told: None) -> None:
    """Distil from a checkpoint, if there is one."""
    import torch

    import tisa
    from tiny import original, token_lists

    torch.manual_seed(3)
    model = original("bert")
    found = tisa.hf.convert(model, init="reference", calibration=token_lists(4))
    tisa.hf.distil(
        found, model, token_lists(4), steps=22, seed=seed, checkpoint="distil.pt", progress=progress
    )
    sums = {name: float(p.double().sum()) for name, p in found.named_parameters()}
    print(json.dumps(sums))
    Path("../distilled.json").write_text(json.dumps(sums))


def demo() -> None:
    """Tell the demo's story with a model that is made on the spot."""
    from dataclasses import replace

    from tisa_lab.demo import story
    from tisa_lab.demo.settings import quick

    tiny = replace(
        quick(), fit_texts=6, distil_steps=2, held_out=4, deeds=2, race_methods=("none",),
        race_steps=2, criteria_methods=("absolute",), training_steps=4,
    )  # fmt: skip
    story.tell(Path("demo"), tiny, cache=Path("cache"), offline=True)


def spoiled() -> None:
    """Damage a run: its newest checkpoint, a line of records, what a killed process leaves."""
    newest = sorted(Path("run/checkpoints").iterdir())[-1]
    shutil.copytree(newest, newest.with_name("step-00000009"))
    flip(newest.with_name("step-00000009") / "optimizer.bin", 99)
    from tisa.store import Lines

    Lines(Path("run/records.jsonl")).append(*({"n": n} for n in range(3)))
    flip(Path("run/records.jsonl"), 5)
    Path("run/.record.json.1.unfinished").write_text("{")


def flip(path: Path, place: int, bit: int = 2) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


SIZES = (
    "--tokenizer bytes --hidden-size 16 --num-hidden-layers 1 --num-attention-heads 2 "
    "--embedding-size 8 --lengths 32 --batch-tokens 128 --device cpu --steps 4 "
    "--checkpoint-every 2"
)
PRETRAIN = f"tisa-lab pretrain --data corpus.txt {SIZES} --out run"
PREPARE = "tisa-lab pretrain --data corpus.txt --tokenizer bytes --prepare prepared"
GLUE = (
    "tisa-lab glue model --tasks cola --kernels 2 --positions replace --init fit --steps 2 "
    "--batch-size 8 --evaluations 1 --data-dir glue --out table3 --device cpu"
)
RUN = ("run/record.json", "run/losses.npy", "run/table.npy", "run/model/*")

COMMANDS = (
    Command("tisa.transformer.save", lambda: transformer(1), ("saved/*",),
            (lambda: transformer(0),), read=printed_model("saved")),
    Command("tisa.hf.save", lambda: converted(1), ("saved/*",), (lambda: converted(0),)),
    Command("pretrain --prepare", PREPARE, ("prepared/*",), (corpus,)),
    Command("pretrain", PRETRAIN, RUN, (corpus,)),
    Command("pretrain, gone on with", PRETRAIN, RUN,
            (corpus, f"{PRETRAIN} --max-seconds 0.000001")),
    Command("pretrain, a grid", f"tisa-lab pretrain --data prepared {SIZES} --out grid "
            "--position tisa,alibi", ("grid/records.jsonl", "grid/*/record.json",
            "grid/*/losses.npy", "grid/*/model/*"), (corpus, PREPARE), (1, 2)),
    Command("glue", f"{GLUE} --seeds 1", ("table3/records.jsonl", "table3/starts/*.safetensors"),
            (glue,), (1, 2)),
    Command("glue, stacked", f"{GLUE} --seeds 2 --executor stacked",
            ("table3/records.jsonl", "table3/starts/*.safetensors"), (glue,), (1, 2)),
    Command("report", "tisa-lab report table3 --out shown", ("shown/*",),
            (glue, f"{GLUE} --seeds 1")),
    Command("convert", "tisa convert model --out converted --text text.txt", ("converted/*",),
            (texts,)),
    Command("convert, with a report", "tisa convert model --out converted --text text.txt "
            "--positions extend --report", ("converted/*",), (texts,)),
    Command("tisa.hf.distil", distilled, ("../distilled.json",)),
    Command("analyze", "tisa analyze model --out analysis", ("analysis/*",), (texts,)),
    Command("criteria", "tisa-lab criteria --methods absolute --out criteria", ("criteria/*",)),
    Command("probes", "tisa-lab probes --methods none --tasks find --steps 2 --length 12 "
            "--out probes", ("probes/*",)),
    Command("recall", "tisa-lab recall --methods none --steps 2 --length 24 --factors 1 --asked 4 "
            "--batch-size 4 --hidden-size 16 --num-hidden-layers 1 --num-attention-heads 2 "
            "--out recall", ("recall/*",)),
    Command("compare", "tisa-lab compare alibi --others none --recall-steps 1 --recall-factors 1,2 "
            "--probe-steps 1 --probe-length 12 --tasks find --steps 2 --length 32 "
            "--batch-tokens 256 --hidden-size 16 --num-attention-heads 2 --num-hidden-layers 1 "
            "--speed-length 32 --speed-rounds 1 --search-steps 1 --device cpu --out compare",
            ("compare/*.*", "compare/runs/probes/records.jsonl", "compare/runs/*/record.json",
             "compare/runs/*/losses.npy", "compare/runs/*/model/*")),
    Command("extrapolate", "tisa-lab extrapolate run --data valid.txt --lengths 8,16 --out far",
            ("far/*",), (corpus, PRETRAIN)),
    Command("long", "tisa-lab long model --data valid.txt --lengths 128 --tasks passkey "
            "--haystacks filler --documents 2 --converted replace --calibration 8 --chunk 32 "
            "--device cpu --out long", ("long/*.*",), (articles,)),
    Command("demo", demo, ("demo/demo.json", "demo/index.html")),
    Command("verify --repair", "tisa verify run --repair",
            ("run/records.jsonl", "run/records.jsonl.damaged", "run/checkpoints/*", *RUN),
            (corpus, PRETRAIN, spoiled), (1, 2)),
)  # fmt: skip
