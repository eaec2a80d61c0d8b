"""Bits that are flipped in files, by the kind of byte, and foreign files in the place of one's own.

What reads the files prints all numbers that it found. Another number, or a crash, is the worst.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import (
    GLUE,
    PREPARE,
    PRETRAIN,
    Action,
    converted,
    corpus,
    digest_of,
    distilled,
    glue,
    printed_converted,
    printed_model,
    run,
    transformer,
)

STRING = rb'"(?:[^"\\]|\\.)*"'
SUM = rb'"[0-9a-f]{64}"'
# Of JSON: a name has a colon behind it.
JSON = re.compile(
    rb"(?P<name>%s(?=\s*:))|(?P<checksum>%s)|(?P<value>%s|[-+0-9.eE]+|true|false|null)"
    % (STRING, SUM, STRING)
)


def classes(path: Path) -> dict[str, list[int]]:
    """Return the places of a file by the kind of byte that stands there."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        return _of_json(content, 0)
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(content[:8], "little")
        found = {f"header {kind}": at for kind, at in _of_json(content[8:start], 8).items()}
        return {"length": [*range(8)], **found, "tensors": [*range(start, len(content))]}
    if path.suffix == ".npy":
        start = 10 + int.from_bytes(content[8:10], "little")
        return {"magic": [*range(8)], "header": [*range(8, start)],
                "numbers": [*range(start, len(content))]}  # fmt: skip
    if content[:1] == b"{":
        start = content.index(b"\n") + 1
        found = {f"header {kind}": at for kind, at in _of_json(content[:start], 0).items()}
        return found | {"content": [*range(start, len(content))]}
    magic, end = content[:2] == b"PK", max(0, len(content) - 512)
    if magic:
        return {"magic": [0, 1, 2, 3], "header": [*range(4, 64)], "content": [*range(64, end)],
                "directory": [*range(end, len(content))]}  # fmt: skip
    return {"content": [*range(len(content))]}


def _of_json(content: bytes, before: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"name": [], "checksum": [], "value": [], "between": []}
    at = 0
    for part in JSON.finditer(content):
        found["between"] += range(before + at, before + part.start())
        assert part.lastgroup is not None
        found[part.lastgroup] += range(before + part.start(), before + part.end())
        at = part.end()
    found["between"] += range(before + at, before + len(content))
    return found


@dataclass(frozen=True)
class Read:
    """Files, what makes them, and what reads them: it prints all numbers that it finds.

    `foreign` makes files of the same names in a folder of another run.
    """

    name: str
    files: tuple[str, ...]
    read: Action
    before: tuple[Action, ...]
    foreign: tuple[Action, ...]
    # It is given so many of the random flips in one file: slow ones are given fewer.
    share: int = 4


def printed_corpus() -> None:
    """Print what a prepared corpus holds."""
    from hashlib import sha256

    from tisa_lab.pretrain.corpus import PreparedCorpus

    found = PreparedCorpus(Path("prepared"))
    told = [sha256(found.tokens.tobytes()).hexdigest(), found.ends.tolist()]
    print(
        json.dumps([*told, vars(found.vocabulary) | {"specials": str(found.vocabulary.specials)}])
    )


def printed_start() -> None:
    """Print what a cell of GLUE starts from."""
    import torch
    import transformers

    import tisa
    from tisa_lab.glue import starts

    torch.manual_seed(0)
    stock = transformers.BertForSequenceClassification.from_pretrained("model")
    model = tisa.hf.convert(stock, num_kernels=2, positions="replace", init="zero", fold=False)
    (path,) = Path("table3/starts").glob("*.safetensors")
    with torch.no_grad():
        about = starts._read(path, model)
    print(json.dumps([digest_of(model), about]))


def without_end() -> None:
    """Make an unfinished run of a finished one."""
    Path("run/record.json").unlink()


def gone_on() -> None:
    """Go on from the newest checkpoint, and print what came of it."""
    from hashlib import sha256

    try:
        run(PRETRAIN)
    finally:
        record = Path("run/record.json")
        if record.is_file():
            told = json.loads(record.read_text())["evaluations"]
            losses = sha256(Path("run/losses.npy").read_bytes()).hexdigest()
            print(json.dumps([told, losses]))


def interrupted(seed: int = 0) -> None:
    """Distil until a step before the end; a checkpoint of step 20 and one before it are there."""

    def stop(told: Any) -> None:
        if told.step == 21:
            raise InterruptedError

    with suppress(InterruptedError):
        distilled(seed, stop)


READS = (
    Read("a finished run", ("run/run.json", "run/record.json"), f"{PRETRAIN} --json",
         (corpus, PRETRAIN), (corpus, f"{PRETRAIN} --seed 1"), share=30),
    Read("its model", ("run/model/*",), printed_model("run/model"),
         (corpus, PRETRAIN), (corpus, f"{PRETRAIN} --seed 1"), share=30),
    Read("its checkpoints", ("run/run.json", "run/checkpoints/*/*"), gone_on,
         (corpus, PRETRAIN, without_end), (corpus, f"{PRETRAIN} --seed 1", without_end), share=14),
    Read("a prepared corpus", ("prepared/**/*",), printed_corpus, (corpus, PREPARE),
         (lambda: corpus(seed=5), PREPARE), share=20),
    Read("records of GLUE", ("table3/records.jsonl",), "tisa-lab report table3 --json",
         (glue, f"{GLUE} --seeds 1"), (glue, f"{GLUE} --seeds 1 --steps 3"), share=60),
    Read("what cells start from", ("table3/starts/*.safetensors",), printed_start,
         (glue, f"{GLUE} --seeds 1"), (), share=40),
    Read("a distillation's checkpoint", ("distil.pt",), distilled, (interrupted,),
         (lambda: interrupted(1),), share=40),
    Read("a saved transformer", ("saved/*",), printed_model("saved"), (lambda: transformer(1),),
         (lambda: transformer(2),), share=30),
    Read("a converted model", ("saved/*.json", "saved/*.safetensors"), printed_converted,
         (lambda: converted(1),), (lambda: converted(2),), share=30),
)  # fmt: skip


def files_of(read: Read, folder: Path) -> list[Path]:
    """Return the files that are damaged, by their names in the folder."""
    found = {p.relative_to(folder) for pattern in read.files for p in folder.glob(pattern)}
    return sorted(p for p in found if (folder / p).is_file() and (folder / p).stat().st_size)


def places(path: Path, each: int, drawn: int, seed: str) -> Iterator[tuple[str, int, int]]:
    """Yield kind of byte, place and bit: so many of each kind, and then some from all of them."""
    rolled = random.Random(seed)
    for kind, at in classes(path).items():
        for place in sorted(rolled.sample(at, min(each, len(at)))):
            yield kind, place, rolled.randrange(8)
    size = path.stat().st_size
    for _ in range(drawn):
        yield "any", rolled.randrange(size), rolled.randrange(8)
