"""Which files of the two packages are executed, called or imported, once `import tisa` is done.

    python tests/files_passed.py forward|glue|pretrain FOLDER

A newcomer who follows one forward pass of a converted model, one cell of GLUE or two steps of
pretraining has to open these. FOLDER has what the commands read; the last line printed is JSON.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (f"{ROOT / 'tisa'}/", f"{ROOT / 'lab' / 'tisa_lab'}/")
COMMANDS = {
    "glue": "glue model --tasks cola --kernels 2 --positions replace --init fit --seeds 1 "
    "--steps 2 --batch-size 8 --evaluations 1 --data-dir glue --out table3 --device cpu",
    "pretrain": "pretrain --data corpus.txt --tokenizer bytes --hidden-size 16 --steps 2 "
    "--num-hidden-layers 2 --num-attention-heads 2 --embedding-size 8 --lengths 32 "
    "--batch-tokens 256 --device cpu --out run",
}


def executed(action: Callable[[], object]) -> list[str]:
    """Return the files of which something runs during the action."""
    found = set()

    def note(frame, event, argument):
        # Returns nothing, so that it is told of calls alone.
        name = frame.f_code.co_filename
        if name.startswith(SOURCES):
            found.add(name)

    sys.settrace(note)
    threading.settrace(note)
    try:
        action()
    except SystemExit as left:
        if left.code:
            raise
    finally:
        sys.settrace(None)
    return sorted(str(Path(name).relative_to(ROOT)) for name in found)


def forward() -> Callable[[], object]:
    """Return one forward pass of a converted BERT."""
    sys.path.insert(0, str(ROOT / "tests" / "hf"))
    import tiny
    import tisa

    model = tisa.hf.convert(tiny.original("bert"), calibration=tiny.token_lists())
    return lambda: model(**tiny.inputs())


def command(words: str) -> Callable[[], object]:
    """Return a command of `tisa-lab`, imported when it is called."""

    def run():
        from tisa_lab.cli import main

        sys.argv = ["tisa-lab", *words.split()]
        main()

    return run


if __name__ == "__main__":
    # Before the tracer, which is slow: what they execute is not ours.
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.trainer  # noqa: F401

    import tisa  # noqa: F401

    what, folder = sys.argv[1:]
    os.chdir(folder)
    print(json.dumps(executed(forward() if what == "forward" else command(COMMANDS[what]))))
