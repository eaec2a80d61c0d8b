"""The two programs, called in this process: what they print, and how they leave."""

from typer.testing import CliRunner

import tisa.cli
import tisa_lab.cli


def tisa_(words):
    """Return what `tisa` answers: exit_code, output, stdout, stderr, exception."""
    return CliRunner().invoke(tisa.cli.PROGRAM.app(), [str(word) for word in words])


def lab(words):
    """Return what `tisa-lab` answers."""
    return CliRunner().invoke(tisa_lab.cli.PROGRAM.app(), [str(word) for word in words])
