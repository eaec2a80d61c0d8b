"""The two programs, called in this process: what they print, and how they leave."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

import tisa.cli
import tisa_lab.cli
from tisa.cli.program import MISTAKES


class Answer(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None

    @property
    def output(self):
        return self.stdout + self.stderr


def answer(program, words):
    """Return what a program answers; a mistake is in `stderr` as it is said, and in `exception`."""
    out, err, wrong, code = StringIO(), StringIO(), None, 0
    words = [str(word) for word in words]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            program.call(words)
        except SystemExit as left:
            code = left.code or 0
        except MISTAKES as mistake:
            wrong, code = mistake, 2
            err.write(f"{program.name}: {program.said(mistake, words)}\n")
        except Exception as broken:
            wrong, code = broken, 1
    return Answer(code, out.getvalue(), err.getvalue(), wrong)


def tisa_(words):
    """Return what `tisa` answers."""
    return answer(tisa.cli.PROGRAM, words)


def lab(words):
    """Return what `tisa-lab` answers."""
    return answer(tisa_lab.cli.PROGRAM, words)
