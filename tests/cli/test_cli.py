import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tisa import cli


def test_help_names_every_command():
    shown = CliRunner().invoke(cli.app(), ["--help"])
    assert shown.exit_code == 0
    for name in cli.COMMANDS:
        assert name in shown.stdout


def test_import_of_the_command_line_needs_no_optional_package():
    heavy = "transformers, datasets, matplotlib, sklearn, ray, torchdiffeq, safetensors"
    code = (
        "import sys\n"
        "from tisa.cli import app\n"
        "app()\n"
        f"print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("mistake", cli.MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(monkeypatch, capsys, mistake):
    def broken() -> typer.Typer:
        made = typer.Typer()

        @made.command()
        def wrong() -> None:
            raise mistake("model: expected a folder, got a lemon")

        return made

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.setattr(sys, "argv", ["tisa"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "tisa: model: expected a folder, got a lemon\n"

    monkeypatch.setattr(sys, "argv", ["tisa", "--debug"])
    with pytest.raises((mistake, SystemExit)):
        cli.main()


def test_an_error_of_the_system_names_the_file_first():
    wrong = FileExistsError(17, "File exists", "table1")
    assert cli._said(wrong, ["criteria"]) == "table1: File exists"
