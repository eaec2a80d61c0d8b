"""The command line: parse, call one function, print. One file for each command.

analyze.py   what models know about position
criteria.py  Table 1, measured
convert.py   a Hugging Face model with scores of the offset
demo.py      the whole story on one page
doctor.py    what works on this machine
extrapolate.py  language models past their training length
glue.py      Table 3, cell by cell
pretrain.py  a language model with any position method
probes.py    tasks that only positions solve
__main__.py  the same for launchers: python -m tisa.cli
report.py    the table of what is finished
device.py    what was given as --device, checked
"""

import sys
from importlib import import_module
from typing import Annotated

import typer

# Name of the command, which is that of its file here too; each has a function `command`.
COMMANDS: tuple[str, ...] = (
    "analyze",
    "convert",
    "criteria",
    "demo",
    "doctor",
    "extrapolate",
    "glue",
    "pretrain",
    "probes",
    "report",
)

# A user's mistake, or something missing on the machine: one sentence and exit code 2.
MISTAKES = (ValueError, TypeError, OSError, ImportError)

# What to install for a command whose packages are missing; for all others "experiments".
EXTRAS = {"analyze": "analysis", "convert": "hf", "demo": "demo"}


def app() -> typer.Typer:
    """Return the command line with all commands."""
    made = typer.Typer(
        name="tisa",
        help="How transformers know where a token stands.",
        no_args_is_help=True,
        rich_markup_mode="markdown",
    )

    @made.callback()
    def options(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error.")
        ] = False,
    ) -> None:
        # Read by `main`, which is what sees the errors.
        del debug

    for name in COMMANDS:
        made.command(name)(import_module(f"tisa.cli.{name}").command)
    return made


def main() -> None:
    """Run `tisa` as a program."""
    try:
        app()(prog_name="tisa", standalone_mode=True)
    except MISTAKES as mistake:
        if "--debug" in sys.argv:
            raise
        print(f"tisa: {_said(mistake, sys.argv[1:])}", file=sys.stderr)
        raise SystemExit(2) from None


def _said(mistake: Exception, arguments: list[str]) -> str:
    """Return what the user reads; a missing package comes with the extra that has it."""
    if isinstance(mistake, OSError) and mistake.filename and mistake.strerror:
        return f"{mistake.filename}: {mistake.strerror}"
    command = next((a for a in arguments if a in COMMANDS), None)
    if not isinstance(mistake, ImportError) or command is None:
        return str(mistake)
    extra = EXTRAS.get(command, "experiments")
    if "pip install" not in str(mistake):
        return f"{mistake}; pip install 'tisa[{extra}]'"
    # Those bring what `tisa.hf` needs along: one installation, not two.
    return str(mistake).replace(
        "tisa[hf]", "tisa[experiments]" if extra == "experiments" else "tisa[hf]"
    )
