"""One word for one thing over all commands, an example in every help, exit codes, completion."""

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cyclopts import CycloptsError

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


COMMANDS = [f"{p.name} {name}" for p in printed.PROGRAMS.values() for name in p.commands]


def loaded(name):
    """Return a command, as cyclopts has it."""
    program, word = name.split()
    return printed.PROGRAMS[program].app([word])[word]


@cache
def options(name):
    """Return what is known of each option of a command."""
    return {
        word: argument
        for argument in loaded(name).assemble_argument_collection()
        for word in argument.names
        if word.startswith("-")
    }


def test_every_command_has_the_same_words():
    wrong = {other: word for word, others in SYNONYMS.items() for other in others}
    for name in COMMANDS:
        for option, parameter in options(name).items():
            assert option not in wrong, f"{name} {option}: say {wrong[option]}"
            assert option.islower(), f"{name} {option}"
            assert "_" not in option, f"{name} {option}: with - and not _"
            assert option.startswith("--"), f"{name} {option}: no short options"
            if option in FLAGS:
                assert parameter.is_flag(), f"{name} {option} is a flag"


def test_every_command_prints_json():
    assert [name for name in COMMANDS if "--json" not in options(name)] == []


def test_an_option_has_one_type_and_default_everywhere():
    kinds, seeds, devices = {}, set(), set()
    for name in COMMANDS:
        for option, argument in options(name).items():
            if option in ("--out", "--seed", "--device", "--data-dir", "--json", "--dry-run"):
                kinds.setdefault(option, set()).add(argument.resolved_hint)
            if option == "--seed":
                seeds.add(argument.field_info.default)
            if option == "--device":
                devices.add(argument.field_info.default)
    assert kinds == {
        "--out": {Path}, "--seed": {int}, "--device": {str}, "--data-dir": {Path},
        "--json": {bool}, "--dry-run": {bool},
    }  # fmt: skip
    assert seeds == {0}
    # A GPU where there is one: tisa.packages.device_named.
    assert devices == {None}


def test_the_words_are_those_of_the_page():
    used = {option for name in COMMANDS for option in options(name)}
    for word in ("--out", "--seed", "--device", "--json", "--data-dir", "--dry-run"):
        assert word in used
        assert f"| `{word}` |" in PAGE


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses_and_explains_every_option(name):
    program, word = name.split()
    examples = re.findall(rf"{name}\b[^`\n]*", loaded(name).help)
    assert examples, f"the docstring of {name} needs an example"
    for example in examples:
        # Parsed, not run: unknown options and missing arguments are errors here.
        words = example.strip().rstrip(".,").split()[1:]
        printed.PROGRAMS[program].app(words).parse_args(words)
    with pytest.raises(CycloptsError, match="--lemon"):
        printed.PROGRAMS[program].app([word]).parse_args([*words, "--lemon"])
    for option, argument in options(name).items():
        assert argument.parameter.help, f"{name} {option} has no help"
    shown = programs.answer(printed.PROGRAMS[program], [word, "--help"])
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


@pytest.mark.parametrize(
    "words",
    [
        "tisa analyze model",
        "tisa-lab criteria --methods t5",
        "tisa-lab demo --offline",
        "tisa-lab probes --tasks find",
        "tisa-lab extrapolate run --data valid.txt",
        "tisa-lab report table3",
        pytest.param("tisa convert model", marks=pytest.mark.full),
        "tisa-lab pretrain --data text.txt --tokenizer bytes",
        pytest.param("tisa-lab glue model", marks=pytest.mark.full),
    ],
)
def test_out_is_never_somebody_elses_folder(tmp_path, monkeypatch, words):
    """A page of that name too is not ours for that."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("my site")
    program, *rest = words.split()
    answer = programs.answer(printed.PROGRAMS[program], [*rest, "--out", "site"])
    assert answer.exit_code == 2
    assert "site is there already, and not empty; name a new folder" in answer.stderr
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["index.html"]
    assert (tmp_path / "site" / "index.html").read_text() == "my site"


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
    def interrupted(self, words):
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "call", interrupted)
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
def test_shell_completion(tmp_path, typed, expected):
    """What bash offers when somebody presses the tab key."""
    program = typed.split()[0]
    script = programs.answer(printed.PROGRAMS[program], ["--show-completion", "bash"]).stdout
    (tmp_path / "script").write_text(script)
    ask = f"""
        source {tmp_path / "script"}
        COMP_WORDS=({typed}); COMP_CWORD={typed.count(" ")}; COMP_LINE="{typed}"
        COMP_POINT=${{#COMP_LINE}}
        "$(complete -p {program} | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected, done.stderr
    assert "tisa --install-completion" in PAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_of_every_shell_knows_commands_and_options(shell):
    script = programs.lab(["--show-completion", shell]).stdout
    for word in ("criteria", "data-dir"):
        assert word in script
