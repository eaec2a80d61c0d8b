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
from typer.testing import CliRunner

from tisa import cli

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
    # Not --length, at which `tisa probes` trains.
    "--max-length": ["--max-len", "--max-seq-length"],
}  # fmt: skip
FLAGS = ("--json", "--dry-run")


def commands():
    return typer.main.get_command(cli.app()).commands


def options(command):
    return {name: p for p in command.params for name in p.opts if name.startswith("-")}


def test_every_command_has_the_same_words():
    wrong = {other: word for word, others in SYNONYMS.items() for other in others}
    for name, command in commands().items():
        for option, parameter in options(command).items():
            assert option not in wrong, f"tisa {name} {option}: say {wrong[option]}"
            assert option.islower(), f"tisa {name} {option}"
            assert "_" not in option, f"tisa {name} {option}: with - and not _"
            assert option.startswith("--"), f"tisa {name} {option}: no short options"
            if option in FLAGS:
                assert parameter.is_flag, f"tisa {name} {option} is a flag"


def test_every_command_prints_json():
    assert {
        name for name, command in commands().items() if "--json" not in options(command)
    } == set()


def test_an_option_has_one_type_and_default_everywhere():
    kinds, seeds = {}, set()
    for name in cli.COMMANDS:
        command = import_module(f"tisa.cli.{name}").command
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


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_an_example_that_parses_and_explains_every_option(name):
    command = commands()[name]
    examples = re.findall(rf"tisa {name}\b[^`\n]*", command.help)
    assert examples, f"the docstring of tisa {name} needs an example"
    for example in examples:
        # Parsed, not run: unknown options and missing arguments are errors here.
        words = example.strip().rstrip(".,").split()[2:]
        command.make_context(name, words)
    for option, parameter in options(command).items():
        assert option == "--help" or parameter.help, f"tisa {name} {option} has no help"
    shown = CliRunner().invoke(cli.app(), [name, "--help"])
    assert shown.exit_code == 0
    assert f"tisa {name}" in shown.stdout


def left_with(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tisa", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


@pytest.mark.parametrize("words", ["--help", "doctor --help"])
def test_exit_code_0(monkeypatch, words):
    assert left_with(monkeypatch, *words.split()) == 0


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "doctor --nonsense",
        "convert",
        "analyze no/such/folder/at/all",
        "probes --methods tisa --tasks find --steps 1 --device lemon",
        # What they import takes a while.
        pytest.param("criteria --methods lemon", marks=pytest.mark.full),
        pytest.param("report nowhere", marks=pytest.mark.full),
        pytest.param("glue model --out new --seeds 0", marks=pytest.mark.full),
        pytest.param("convert nowhere --out new --lengths ten", marks=pytest.mark.full),
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
    from tisa.cli.pretrain import _Stopping

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
    import tisa.experiments.pretrain.training as training

    def interrupted(*arguments, stop, **options):
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()

    (tmp_path / "text").with_suffix(".txt").write_text("some words\n\n" * 90)
    monkeypatch.setattr(training, "run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    words = f"pretrain --data {tmp_path}/text.txt --tokenizer bytes --lengths 32 --out {tmp_path}/x"
    assert left_with(monkeypatch, *words.split(), "--batch-tokens", "64", "--device", "cpu") == 130
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_is_130_and_no_traceback(monkeypatch, capsys):
    def interrupted() -> typer.Typer:
        made = typer.Typer()

        @made.command()
        def wait() -> None:
            raise KeyboardInterrupt

        return made

    monkeypatch.setattr(cli, "app", interrupted)
    assert left_with(monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("tisa cr", ["criteria"]), ("tisa glue --da", ["--data-dir"]), ("tisa lemon", [])],
)
def test_shell_completion(monkeypatch, capsys, typed, expected):
    """What a shell asks the program when somebody presses the tab key."""
    monkeypatch.setenv("_TISA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert left_with(monkeypatch) == 0
    assert capsys.readouterr().out.split() == expected
    assert "tisa --install-completion" in PAGE
