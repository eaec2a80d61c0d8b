"""The command line `tisa`: one file for each command.

program.py   what this program and the laboratory's have in common
options.py   a command's options, read from its function
analyze.py   what models know about position
convert.py   a Hugging Face model with scores of the offset
doctor.py    what works on this machine
verify.py    whether what was written is whole
__main__.py  the same for launchers: python -m tisa.cli
"""

from tisa.cli.program import Program

PROGRAM = Program(
    name="tisa",
    help="How transformers know where a token stands.",
    package="tisa.cli",
    commands=("analyze", "convert", "doctor", "verify"),
    brings={"analyze": "tisa[analysis]", "": "tisa[hf]"},
)


def main() -> None:
    """Run `tisa` as a program."""
    PROGRAM.main()
