"""A program of several commands: parse, call one function, print; a mistake is one sentence.

`tisa` and the laboratory's `tisa-lab` are two of them. A command is imported when it is called:
`tisa --help` reads what it does from its file.
"""

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter as Place
from inspect import signature
from typing import Any, Literal

from cyclopts import App, CycloptsError

from tisa.cli.options import flag, with_options
from tisa.store.files import DISK

# A user's mistake, or something missing on the machine: one sentence and exit code 2.
MISTAKES = (ValueError, TypeError, OSError, ImportError)
DISK_REMEDY = "look after the disk and the rights of its files, and start the same command again"
# How an error begins that is about arguments: "lengths must be …", "steps and epochs: …".
SUBJECT = re.compile(r"\w+((, | and | or )\w+)*(?=:| must | is | are | need| has | have )")


@dataclass(frozen=True)
class Program:
    """Commands by name; each is a module of `package` with a function `command`."""

    name: str
    help: str
    package: str
    commands: tuple[str, ...]
    # What to install where a command's packages are missing; "" stands for all others.
    brings: dict[str, str] = field(default_factory=dict)

    def app(self, loaded: Sequence[str] | None = None) -> App:
        """Return the command line, with the options of the commands `loaded`.

        By default of all whose packages are installed.
        """
        version = import_module(self.package.partition(".")[0]).__version__
        made = App(
            name=self.name, help=self.help, help_flags="--help", help_format="markdown",
            version=f"{self.name} {version}", result_action="return_value", exit_on_error=False,
            print_error=False, suppress_keyboard_interrupt=False,
        )  # fmt: skip
        for name in self.commands:
            try:
                known = self._command(name) if loaded is None or name in loaded else None
            except ImportError:
                if loaded is not None:
                    raise
                known = None
            summary = None if known else self._summary(name)
            made.command(known or _nothing, name=name, help=summary)
        # Taken away by `main` before anything is parsed: here for its help.
        made.command(_nothing, name="--debug", help="Show the traceback of an error.")
        made.register_install_completion_command()

        def show_completion(
            shell: Literal["bash", "zsh", "fish", "powershell"] | None = None, /
        ) -> None:
            print(made.generate_completion(shell=shell))

        made.command(
            show_completion,
            name="--show-completion",
            help="Only print it; of this shell, or of the one named.",
        )
        return made

    def call(self, words: Sequence[str]) -> None:
        """Run a command; what was wrong is raised."""
        everything = [word for word in words if word.endswith("-completion")]
        try:
            self.app(None if everything else words)(list(words) or ["--help"])
        except CycloptsError as wrong:
            # One sentence, without the function and its file.
            wrong.verbose = False
            raise ValueError(str(wrong)) from wrong

    def main(self) -> None:
        """Run it with the arguments of this process."""
        words = [word for word in sys.argv[1:] if word != "--debug"]
        try:
            self.call(words)
        except MISTAKES as mistake:
            if len(words) < len(sys.argv) - 1:
                raise
            print(f"{self.name}: {self.said(mistake, words)}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        raise SystemExit(0)

    def said(self, mistake: Exception, words: Sequence[str]) -> str:
        """Return what the user reads: arguments by their options, a package with what brings it."""
        if isinstance(mistake, OSError) and mistake.strerror and mistake.errno in DISK:
            # Of ours with what to do; others say the number alone, some of them with the file.
            told = str(mistake.strerror)
            where = f"{mistake.filename}: " if mistake.filename else ""
            return told if "; " in told else f"{where}{told}; {DISK_REMEDY}"
        if isinstance(mistake, OSError) and mistake.filename and mistake.strerror:
            return f"{mistake.filename}: {mistake.strerror}"
        said = str(mistake)
        command = next((word for word in words if word in self.commands), None)
        if command is None:
            return said
        if isinstance(mistake, ImportError):
            brings = self.brings.get(command, self.brings.get("", self.name))
            if "pip install" not in said:
                return f"{said}; pip install '{brings}'"
            # The laboratory brings what `tisa.hf` needs along: one installation, not two.
            return said.replace("tisa[hf]", brings)
        subject = SUBJECT.match(said)
        # A file may have the name of an option.
        if subject is None or isinstance(mistake, OSError):
            return said
        places = signature(self._command(command)).parameters
        named = re.sub(r"\w+", lambda word: _shown(word[0], places.get(word[0])), subject[0])
        return named + said[subject.end() :]

    def _command(self, name: str) -> Any:
        return with_options(import_module(f"{self.package}.{name}").command)

    def _summary(self, name: str) -> str:
        """Return the first line of a command's docstring, without importing the command."""
        spec = find_spec(f"{self.package}.{name}")
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
        for part in ast.parse(source).body:
            if isinstance(part, ast.FunctionDef) and part.name == "command":
                return (ast.get_docstring(part) or "").splitlines()[0]
        raise AssertionError(f"{self.package}.{name} has no function `command`")


def _shown(name: str, place: Place | None) -> str:
    if place is None:
        return name
    return name.upper() if place.kind is Place.POSITIONAL_ONLY else flag(name)


def _nothing() -> None:
    """Do nothing: stands for a command that is not called."""
