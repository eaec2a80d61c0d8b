"""`tisa verify` on a real folder of every kind: whole as it was written, and every damage named."""

import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest

import command
from little_corpus import SMALL, text
from little_glue import make_data, make_model, sentence
from tisa import store
from tisa.store.verification import verified
from tisa_lab.pretrain import checkpoints

# Words of the commands, in the order in which they need each other; of each folder what is in it.
PROBES = "--length 12 --factors 1 --steps 2 --hidden-size 8 --asked 4 --batch-size 4"
COMMANDS = {
    "corpus": "pretrain --data corpus.txt --tokenizer bytes --prepare corpus",
    "run": f"pretrain --data corpus --steps 4 --checkpoint-every 2 --out run {' '.join(SMALL[2:])}",
    "grid": "pretrain --data corpus.txt --steps 2 --position none,alibi --out grid "
    + " ".join(SMALL),
    "glue": "glue model --tasks cola --kernels 2 --positions replace --init fit --seeds 1 "
    "--steps 2 --batch-size 8 --evaluations 1 --data-dir data --device cpu --out glue",
    "report": "report glue --out report",
    "criteria": "criteria --methods none --device cpu --out criteria",
    "probes": f"probes --methods none --tasks find --device cpu --out probes {PROBES}",
    "extrapolate": "extrapolate run --data corpus.txt --lengths 32 --device cpu --out extrapolate",
    "demo": "demo --quick --offline --cache-dir cache --no-open --device cpu --out demo",
    "convert": "convert model --text words.txt --out convert --device cpu",
    "analyze": "analyze model --out analyze",
}
KINDS = {
    "corpus": {"prepared corpus"},
    "run": {"pretraining checkpoint", "run", "pretrain", "transformer"},
    "grid": {"records", "run", "pretrain", "transformer"},
    "glue": {"records", "tensors"},
    "report": {"Table 3"},
    "criteria": {"criteria"},
    "probes": {"probes"},
    "extrapolate": {"extrapolation"},
    "demo": {"demo", "kernels", "small model", "distillation checkpoint", "model"},
    "convert": {"converted model"},
    "analyze": {"analysis"},
}


NEEDS = {"run": "corpus", "report": "glue", "extrapolate": "run"}
SMALL_FORM = ("corpus", "run", "grid", "criteria")
NAMES = [
    name if name in SMALL_FORM else pytest.param(name, marks=pytest.mark.full) for name in KINDS
]


class Place:
    """A folder in which commands are run, each once."""

    def __init__(self, path):
        self.path, self.done = path, set()
        make_data(path / "data")
        make_model(path / "model")
        (path / "corpus.txt").write_text(text())
        drawn = random.Random(0)
        (path / "words.txt").write_text("\n".join(sentence(drawn) for _ in range(20)))

    def folder(self, name):
        if name not in self.done:
            if name in NEEDS:
                self.folder(NEEDS[name])
            answer = self.answer(COMMANDS[name].split())
            assert answer.exit_code == 0, (answer.output, answer.exception)
            self.done.add(name)
        return self.path / name

    def answer(self, words):
        before = Path.cwd()
        os.chdir(self.path)
        try:
            program = command.tisa_ if words[0] in ("convert", "analyze") else command.lab
            return program(words)
        finally:
            os.chdir(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_whole_as_it_was_written(place, name):
    folder = place.folder(name)
    found = verified(folder)
    assert {item.state for item in found} == {"whole"}, found
    assert KINDS[name] <= {item.kind for item in found}
    answer = command.tisa_(["verify", str(folder)])
    assert (answer.exit_code, answer.stdout.splitlines()[-1]) == (0, "Whole."), answer.output


def _kept(folder):
    """Return the files of which a change changes what is read; logs and locks change nothing."""
    return sorted(
        path for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size and path.suffix != ".txt"
        and not path.name.startswith(".") and "README" not in path.name
        and "claims" not in path.parts
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_changed_file_is_named(place, name):
    folder = place.folder(name)
    for path in _kept(folder):
        whole = path.read_bytes()
        for at in {0, len(whole) // 3, len(whole) // 2, len(whole) - 2} & {*range(len(whole))}:
            changed = bytearray(whole)
            changed[at] ^= 1 << at % 8
            path.write_bytes(changed)
            damages = [damage for item in verified(folder) for damage in item.damages]
            path.write_bytes(whole)
            assert any(path.name in damage for damage in damages), (path, at, damages)


@pytest.mark.parametrize("name", NAMES)
def test_every_lost_file_is_seen(place, name):
    folder = place.folder(name)
    known = verified(folder)
    for path in _kept(folder):
        away = path.with_name("elsewhere")
        path.rename(away)
        found = verified(folder)
        away.rename(path)
        # Damage, or one thing less, or no longer proved: nobody knows what never was there.
        assert found != known, path


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("glue", "grid")])
def test_a_second_writer_is_refused_and_told_who_is_the_first(place, name, monkeypatch):
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.0)
    held, may_end, out = threading.Event(), threading.Event(), place.path / f"held-{name}"
    inside = name in ("run", "report", "criteria", "probes", "extrapolate", "demo")

    def hold():
        with store.own_folder(out, own=()) if inside else store.alone(out):
            held.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    words = [str(out) if word == name and before in ("--out", "--prepare") else word
             for before, word in pairwise(["", *COMMANDS[name].split()])]  # fmt: skip
    if name == "run":
        place.folder("corpus")
    try:
        answer = place.answer(words)
    finally:
        may_end.set()
        holder.join()
    assert answer.exit_code == 2, answer.output
    assert f"process {os.getpid()} on " in answer.stderr
    assert "writes there; wait for its end, or name another folder" in answer.stderr
