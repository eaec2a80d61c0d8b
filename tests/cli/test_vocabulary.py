"""One word for one thing over all commands, an example in every help, exit codes, completion."""

import os
import re
import signal
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import pytest
import typer

import command as programs
import printed
from tisa.cli.program import Program

PAGE = (Path(__file__).parents[2] / "docs/command_line.md").read_text()
# The word for it, and others that people use for the same.
SYNONYMS = {
    "--out": ["--output", "--outdir", "--out-dir", "--output-dir", "--save", "--save-to", "--dest",
              "--folder", "--target"],
    "--seed": ["--random-seed", "--rng", "--random-state"],
    "--device": ["--gpu", "--cuda", "--cpu", "--on", "--accelerator"],
    "--json": ["--as-json", "--format", "--output-format", "--machine-readable"],
    "--data-dir": ["--data-folder", "--dataset-dir", "--datasets", "--root"],
    "--dry-run": ["--dry", "--plan", "--simulate", "--no-op", "--pretend", "--preview"],
    "--steps": ["--max-steps", "--num-steps", "--iterations"],
    "--learning-rate": ["--lr", "--rate"],
    "--batch-size": ["--batch", "--bs"],
    "--text": ["--text-file", "--texts", "--corpus"],
    "--workers": ["--jobs", "--processes", "--num-workers", "--n-jobs"],
    # Not --length, at which `tisa-lab probes` trains.
    "--max-length": ["--max-len", "--max-seq-length"],
}  # fmt: skip
FLAGS = ("--json", "--dry-run")


def commands():
    """Return every command by the words that call it."""
    return {
        f"{program.name} {name}": made
        for program in printed.PROGRAMS.values()
        for name, made in typer.main.get_command(program.app()).commands.items()
    }


COMMANDS = sorted(commands())


def options(command):
    return {name: p for p in command.params for name in p.opts if name.startswith("-")}


def test_every_command_has_the_same_words():
    wrong = {other: word for word, others in SYNONYMS.items() for other in others}
    for name, command in commands().items():
        for option, parameter in options(command).items():
            assert option not in wrong, f"{name} {option}: say {wrong[option]}"
            assert option.islower(), f"{name} {option}"
            assert "_" not in option, f"{name} {option}: with - and not _"
            assert option.startswith("--"), f"{name} {option}: no short options"
            if option in FLAGS:
                assert parameter.is_flag, f"{name} {option} is a flag"


def test_every_command_prints_json():
    assert {
        name for name, command in commands().items() if "--json" not in options(command)
    } == set()


def test_an_option_has_one_type_and_default_everywhere():
    kinds, seeds = {}, set()
    for program, name in (words.split() for words in COMMANDS):
        command = import_module(f"{printed.PROGRAMS[program].package}.{name}").command
        for option, kind in get_type_hints(command).items():
            if option in ("out", "seed", "device", "data_dir", "as_json", "dry_run"):
                kinds.setdefault(option, set()).update(set(get_args(kind) or (kind,)) - {NoneType})
        if "seed" in signature(command).parameters:
            seeds.add(signature(command).parameters["seed"].default)
    assert kinds == {
        "out": {Path}, "seed": {int}, "device": {str}, "data_dir": {Path}, "as_json": {bool},
        "dry_run": {bool},
    }  # fmt: skip
    assert seeds == {0}


def test_the_words_are_those_of_the_page():
    used = {option for command in commands().values() for option in options(command)}
    for word in ("--out", "--seed", "--device", "--json", "--data-dir", "--dry-run"):
        assert word in used
        assert f"| `{word}` |" in PAGE


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses_and_explains_every_option(name):
    command = commands()[name]
    examples = re.findall(rf"{name}\b[^`\n]*", command.help)
    assert examples, f"the docstring of {name} needs an example"
    for example in examples:
        # Parsed, not run: unknown options and missing arguments are errors here.
        words = example.strip().rstrip(".,").split()[2:]
        command.make_context(name, words)
    for option, parameter in options(command).items():
        assert option == "--help" or parameter.help, f"{name} {option} has no help"
    program, word = name.split()
    shown = {"tisa": programs.tisa_, "tisa-lab": programs.lab}[program]([word, "--help"])
    assert shown.exit_code == 0
    assert word in shown.stdout


def left_with(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [*words])
    with pytest.raises(SystemExit) as left:
        printed.PROGRAMS[words[0]].main()
    return left.value.code


@pytest.mark.parametrize("words", ["tisa --help", "tisa doctor --help", "tisa-lab --help"])
def test_exit_code_0(monkeypatch, words):
    assert left_with(monkeypatch, *words.split()) == 0


@pytest.mark.parametrize(
    "words",
    [
        "tisa nonsense",
        "tisa doctor --nonsense",
        "tisa convert",
        "tisa analyze no/such/folder/at/all",
        "tisa-lab probes --methods tisa --tasks find --steps 1 --device lemon",
        # What they import takes a while.
        pytest.param("tisa-lab criteria --methods lemon", marks=pytest.mark.full),
        pytest.param("tisa-lab report nowhere", marks=pytest.mark.full),
        pytest.param("tisa-lab glue model --out new --seeds 0", marks=pytest.mark.full),
        pytest.param("tisa convert nowhere --out new --lengths ten", marks=pytest.mark.full),
    ],
)
def test_exit_code_2_and_a_sentence(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    assert left_with(monkeypatch, *words.split()) == 2
    said = capsys.readouterr().err
    assert said.strip()
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_pretraining_is_told_of_ctrl_c():
    from tisa_lab.cli.pretrain import _Stopping

    before = signal.getsignal(signal.SIGINT)
    with _Stopping() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
        assert stopping.asked == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.full
def test_ctrl_c_in_pretraining_is_130_after_the_checkpoint(monkeypatch, tmp_path):
    """The run is told to stop, and what it writes then is in its own tests."""
    import tisa_lab.pretrain.training as training

    def interrupted(*arguments, stop, **options):
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()

    (tmp_path / "text").with_suffix(".txt").write_text("some words\n\n" * 90)
    monkeypatch.setattr(training, "run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    words = f"tisa-lab pretrain --data {tmp_path}/text.txt --tokenizer bytes --out {tmp_path}/x"
    words += " --lengths 32 --batch-tokens 64 --device cpu"
    assert left_with(monkeypatch, *words.split()) == 130
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_is_130_and_no_traceback(monkeypatch, capsys):
    def interrupted(self) -> typer.Typer:
        made = typer.Typer()

        @made.command()
        def wait() -> None:
            raise KeyboardInterrupt

        return made

    monkeypatch.setattr(Program, "app", interrupted)
    assert left_with(monkeypatch, "tisa") == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tisa do", ["doctor"]),
        ("tisa-lab cr", ["criteria"]),
        ("tisa-lab glue --da", ["--data-dir"]),
        ("tisa lemon", []),
    ],
)
def test_shell_completion(monkeypatch, capsys, typed, expected):
    """What a shell asks the program when somebody presses the tab key."""
    program = typed.split()[0]
    monkeypatch.setenv(f"_{program.upper().replace('-', '_')}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert left_with(monkeypatch, program) == 0
    assert capsys.readouterr().out.split() == expected
    assert "tisa --install-completion" in PAGE
