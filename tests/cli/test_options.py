"""Options from a signature: every kind of parameter, its help, its default, what is refused."""

import ast
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

import command as programs
from tisa.cli import options
from tisa.cli.options import KeywordsOf
from tisa.cli.program import Program

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    tokens: int
    share: float = 1.0


@dataclass(frozen=True)
class Config:
    """What a run is.

    Attributes:
        steps: how many.
        lengths: tokens,
            and their shares.
    """

    steps: int = 10
    lengths: tuple[Part, ...] = (Part(512),)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")


def behind(model, *, seed: int = 0, max_length: int | None = None, progress: Any = None):
    """Do it.

    Args:
        model: not a keyword.
        seed: of all.
        max_length: in tokens.
        progress: called often.
    """


FROM = f"{__name__}:behind"


def command(
    models: list[str],
    /,
    *,
    config: Config,
    tasks: tuple[str, ...] = ("cola", "rte"),
    span: tuple[int, int] | None = None,
    fold: tuple[bool, ...] = (False,),
    inits: tuple[Literal["zero", "fit"], ...] = ("fit",),
    data: list[Path] | None = None,
    extra: dict[str, Any] | None = None,
    kind: Literal["a", "b"] = "a",
    open_: bool | None = None,
    keep: bool = True,
    as_json: bool = False,
    **more: Annotated[Any, KeywordsOf(FROM, without=("progress",))],
) -> None:
    """Try all kinds.

    Args:
        models: some.
        tasks: of GLUE.
        **more: as `behind`.
    """
    SEEN.clear()
    SEEN.update(locals())


SEEN = {}


@pytest.fixture
def program(monkeypatch):
    module = types.ModuleType("little_commands.try_it")
    module.command = command
    package = types.ModuleType("little_commands")
    package.__version__ = "3"
    monkeypatch.setitem(__import__("sys").modules, "little_commands", package)
    monkeypatch.setitem(__import__("sys").modules, "little_commands.try_it", module)
    return Program("little", "Little.", "little_commands", ("try_it",))


def seen(program, words):
    answer = programs.answer(program, ["try_it", *words.split()])
    assert answer.exit_code == 0, answer.stderr
    return SEEN


def test_defaults_are_those_of_the_signature_the_dataclass_and_the_function(program):
    found = seen(program, "one two")
    assert found["models"] == ["one", "two"]
    assert found["config"] == Config()
    assert found["more"] == {"seed": 0, "max_length": None}
    assert (found["tasks"], found["keep"], found["open_"]) == (("cola", "rte"), True, None)


def test_every_kind(program):
    found = seen(
        program,
        "m --steps 3 --lengths 128:0.9,512 --tasks mrpc,sts-b --span 8,384 --fold no,yes "
        '--inits zero --data x --data y --extra {"layers":[1]} --kind b --no-open --no-keep '
        "--json --seed -4 --max-length 9 --kind a",
    )
    assert found["config"] == Config(3, (Part(128, 0.9), Part(512, 1.0)))
    assert found["tasks"] == ("mrpc", "sts-b")
    assert found["span"] == (8, 384)
    assert found["fold"] == (False, True)
    assert found["inits"] == ("zero",)
    assert found["data"] == [Path("x"), Path("y")]
    assert found["extra"] == {"layers": [1]}
    assert (found["open_"], found["keep"], found["as_json"]) == (False, False, True)
    # The last counts.
    assert found["kind"] == "a"
    assert found["more"] == {"seed": -4, "max_length": 9}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("m --span ten", "--span: expected two whole numbers with commas between them, got 'ten'"),
        ("m --span 1,2,3", "--span: expected two whole numbers with commas between them"),
        ("m --tasks ,", "--tasks: expected names with commas between them, got ','"),
        ("m --fold maybe", "--fold: expected yes or no with commas between them, got 'maybe'"),
        ("m --inits fit,one", "--inits: expected zero or fit with commas between them"),
        ("m --lengths 1:2:3", "--lengths: expected numbers as in 128:0.9,512:0.1"),
        ("m --extra [1]", "--extra: expected an object in JSON, got '[1]'"),
        ("m --step 3", "Unknown option: --step. Did you mean --steps?"),
        ("m --no-json", "Unknown option: --no-json"),
        ("m --progress 1", "Unknown option: --progress"),
        ("", "requires an argument"),
        # The dataclass's own, in the words of the command line.
        ("m --steps 0", "little: --steps must be 1 or more, got 0\n"),
    ],
)
def test_what_is_refused_in_one_sentence(program, words, said):
    answer = programs.answer(program, ["try_it", *words.split()])
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_help_has_what_docstrings_say(program):
    shown = programs.answer(program, ["try_it", "--help"]).stdout
    words = " ".join(shown.replace("│", " ").split())
    for said in (
        "--steps INT How many. [default: 10]",
        "--lengths PART,… Tokens, and their shares. [default: 512:1.0]",
        "--tasks STR,… Of GLUE. [default: cola,rte]",
        "--span INT,INT",
        "--seed INT Of all. [default: 0]",
        "--keep --no-keep [default: True]",
        "--open --no-open",
    ):
        assert said in words
    assert "--no-json" not in words
    assert "[default: False]" not in words


def test_an_option_stands_once():
    def twice(*, config: Config, steps: int = 1) -> None:
        pass

    with pytest.raises(AssertionError, match="twice"):
        options.with_options(twice)


def errors(path):
    """Yield the strings of all errors that a file raises."""
    for part in ast.walk(ast.parse(path.read_text())):
        if isinstance(part, ast.Raise):
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


@pytest.mark.parametrize("package", ["tisa", "lab/tisa_lab"])
def test_errors_of_the_library_name_no_options(package):
    """They name parameters, which `Program.said` translates; whole commands stand in backticks."""
    wrong = [
        f"{path.relative_to(ROOT)}: {said}"
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "cli"
        for said in errors(path)
        if re.search(r"(^|[^\w-])--[a-z]", re.sub("`[^`]*`|pip install.*", "", said))
    ]
    assert wrong == []
