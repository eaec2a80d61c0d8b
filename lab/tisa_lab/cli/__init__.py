"""The command line `tisa-lab`: one file for each command.

compare.py   a method of one's own beside the others, on one page
criteria.py  Table 1, measured
demo.py      the whole story on one page
extrapolate.py  language models past their training length
glue.py      Table 3, cell by cell
long.py      encoders on long texts, beside pieces of them
pretrain.py  a language model with any position method
probes.py    tasks that only positions solve
recall.py    what small decoders remember from far away
report.py    the table of what is finished
__main__.py  the same for launchers: python -m tisa_lab.cli
"""

from tisa.cli.program import Program

PROGRAM = Program(
    name="tisa-lab",
    help="Position methods measured: the paper's tables, pretraining, length, a demo.",
    package="tisa_lab.cli",
    commands=(
        "compare",
        "criteria",
        "demo",
        "extrapolate",
        "glue",
        "long",
        "pretrain",
        "probes",
        "recall",
        "report",
    ),
    brings={"": "tisa-lab"},
)


def main() -> None:
    """Run `tisa-lab` as a program."""
    PROGRAM.main()
