import subprocess
import sys

import pytest
import typer

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


def test_import_of_the_command_line_needs_no_optional_package():
    heavy = "transformers, datasets, matplotlib, sklearn, ray, torchdiffeq, safetensors"
    code = (
        "import sys\n"
        "import tisa.cli, tisa_lab.cli\n"
        "tisa.cli.PROGRAM.app(), tisa_lab.cli.PROGRAM.app()\n"
        f"print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(monkeypatch, capsys, mistake):
    def broken(self) -> typer.Typer:
        made = typer.Typer()

        @made.command()
        def wrong() -> None:
            raise mistake("model: expected a folder, got a lemon")

        return made

    monkeypatch.setattr(Program, "app", broken)
    main = printed.PROGRAMS["tisa"].main
    monkeypatch.setattr(sys, "argv", ["tisa"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "tisa: model: expected a folder, got a lemon\n"

    monkeypatch.setattr(sys, "argv", ["tisa", "--debug"])
    with pytest.raises((mistake, SystemExit)):
        main()


def test_an_error_of_the_system_names_the_file_first():
    wrong = FileExistsError(17, "File exists", "table1")
    assert printed.PROGRAMS["tisa-lab"].said(wrong, ["criteria"]) == "table1: File exists"
