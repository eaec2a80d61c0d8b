import subprocess
import sys

import pytest

import command
import printed
from tisa.cli.program import MISTAKES, Program

PROGRAMS = printed.PROGRAMS.values()


def test_help_names_every_command():
    for program, call in zip(PROGRAMS, (command.tisa_, command.lab), strict=True):
        shown = call(["--help"])
        assert shown.exit_code == 0
        for name in program.commands:
            assert name in shown.stdout


HEAVY = "transformers, datasets, matplotlib, sklearn, ray, safetensors"


@pytest.mark.parametrize("package", ["tisa", "tisa_lab"])
def test_help_needs_no_optional_package(package):
    code = (
        f"import sys, {package}.cli as cli\n"
        "cli.PROGRAM.call(['--help'])\n"
        f"print([m for m in '{HEAVY}'.split(', ') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_version(program):
    import tisa

    assert command.answer(program, ["--version"]).stdout == f"{program.name} {tisa.__version__}\n"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(monkeypatch, capsys, mistake):
    def broken(self, words):
        raise mistake("model: expected a folder, got a lemon")

    monkeypatch.setattr(Program, "call", broken)
    main = printed.PROGRAMS["tisa"].main
    monkeypatch.setattr(sys, "argv", ["tisa"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "tisa: model: expected a folder, got a lemon\n"

    monkeypatch.setattr(sys, "argv", ["tisa", "--debug"])
    with pytest.raises(mistake):
        main()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (ValueError("num_kernels must be 1, got 0"), "--num-kernels must be 1, got 0"),
        (TypeError("text: expected a file"), "--text: expected a file"),
        (ValueError("seed and lengths: expected one"), "--seed and --lengths: expected one"),
        (ValueError("model must be a folder"), "MODEL must be a folder"),
        # Not about the argument: a file of that name, another word, the middle of a sentence.
        (FileNotFoundError("text: no such file"), "text: no such file"),
        (ValueError("lemons must be yellow"), "lemons must be yellow"),
        (ValueError("a model must be a folder"), "a model must be a folder"),
        (ValueError("text"), "text"),
    ],
)  # fmt: skip
def test_a_parameter_is_said_as_its_option(mistake, said):
    assert printed.PROGRAMS["tisa"].said(mistake, ["convert"]) == said


def test_an_error_of_the_system_names_the_file_first():
    wrong = FileExistsError(17, "File exists", "table1")
    assert printed.PROGRAMS["tisa-lab"].said(wrong, ["criteria"]) == "table1: File exists"
