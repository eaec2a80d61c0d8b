"""A program of several commands: parse, call one function, print; a mistake is one sentence.

`tisa` and the laboratory's `tisa-lab` are two of them.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated

import typer

# A user's mistake, or something missing on the machine: one sentence and exit code 2.
MISTAKES = (ValueError, TypeError, OSError, ImportError)


@dataclass(frozen=True)
class Program:
    """Commands by name; each is a module of `package` with a function `command`."""

    name: str
    help: str
    package: str
    commands: tuple[str, ...]
    # What to install where a command's packages are missing; "" stands for all others.
    brings: dict[str, str] = field(default_factory=dict)

    def app(self) -> typer.Typer:
        """Return the command line with all commands."""
        made = typer.Typer(
            name=self.name, help=self.help, no_args_is_help=True, rich_markup_mode="markdown"
        )

        @made.callback()
        def options(
            debug: Annotated[
                bool, typer.Option("--debug", help="Show the traceback of an error.")
            ] = False,
        ) -> None:
            # Read by `main`, which is what sees the errors.
            del debug

        for name in self.commands:
            made.command(name)(import_module(f"{self.package}.{name}").command)
        return made

    def main(self) -> None:
        """Run it with the arguments of this process."""
        try:
            self.app()(prog_name=self.name, standalone_mode=True)
        except MISTAKES as mistake:
            if "--debug" in sys.argv:
                raise
            print(f"{self.name}: {self.said(mistake, sys.argv[1:])}", file=sys.stderr)
            raise SystemExit(2) from None

    def said(self, mistake: Exception, arguments: list[str]) -> str:
        """Return what the user reads; a missing package comes with what brings it."""
        if isinstance(mistake, OSError) and mistake.filename and mistake.strerror:
            return f"{mistake.filename}: {mistake.strerror}"
        command = next((a for a in arguments if a in self.commands), None)
        if not isinstance(mistake, ImportError) or command is None:
            return str(mistake)
        brings = self.brings.get(command, self.brings.get("", self.name))
        if "pip install" not in str(mistake):
            return f"{mistake}; pip install '{brings}'"
        # The laboratory brings what `tisa.hf` needs along: one installation, not two.
        return str(mistake).replace("tisa[hf]", brings)
