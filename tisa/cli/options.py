"""A command's options, read from its function: from the signature and the docstring's `Args:`.

- A parameter before `/` is an argument, any other an option: `max_length` is --max-length.
  `as_json` and `compile_`, whose plain names mean something else, are --json and --compile.
- A bool is a flag; it has a --no-… where it is not False by default.
- A tuple is written with commas, a tuple in it with colons (128:0.9,512:0.1).
- A list is given several times, of any other option the last counts. A dict is written in JSON.
- A dataclass stands for its fields, `**options: Annotated[Any, KeywordsOf("module:function")]` for
  the keywords of that function: their types, defaults and help are options of the command.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter as Place
from inspect import Signature, getdoc, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter, Token
from docstring_parser import parse


@dataclass(frozen=True)
class KeywordsOf:
    """The keywords of a function, given as "module:name", but for some."""

    function: str
    without: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)


def flag(name: str) -> str:
    """Return the option of a parameter."""
    return "--" + name.removeprefix("as_").removesuffix("_").replace("_", "-")


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command for cyclopts: one parameter for each option, explained."""
    options = list(_options(function))
    names = [place.name for _, place in options]
    assert len(names) == len(set(names)), f"{function.__module__}: options twice in {names}"
    own = signature(function).parameters

    @wraps(function)
    def command(*arguments: Any, **given: Any) -> Any:
        parts: dict[str, dict[str, Any]] = {}
        for owner, place in options:
            if owner != place.name:
                value = given.pop(place.name, place.default)
                parts.setdefault(owner, {})[place.name] = value
        for owner, part in parts.items():
            if own[owner].kind is Place.VAR_KEYWORD:
                given |= part
            else:
                given[owner] = _bare(get_type_hints(function)[owner])(**part)
        return function(*arguments, **given)

    command.__doc__ = parse(getdoc(function) or "").description
    command.__annotations__ = {place.name: place.annotation for _, place in options}
    command.__signature__ = Signature([place for _, place in options])  # type: ignore[attr-defined]
    return command


def _options(function: Callable[..., Any]) -> Iterator[tuple[str, Place]]:
    """Yield each option, and the parameter of the function that takes it."""
    hints, helps = get_type_hints(function, include_extras=True), _helps(function)
    for owner, place in signature(function).parameters.items():
        if place.kind is Place.VAR_KEYWORD:
            source = get_args(hints[owner])[1]
            other = source.load()
            theirs, explained = get_type_hints(other, include_extras=True), _helps(other)
            for name, inner in signature(other).parameters.items():
                if inner.kind is Place.KEYWORD_ONLY and name not in (*source.without, *hints):
                    yield owner, _option(name, theirs[name], inner.default, explained.get(name))
        elif is_dataclass(config := _bare(hints[owner])):
            theirs, explained = get_type_hints(config, include_extras=True), _helps(config)
            for field in (field for field in fields(config) if field.init):
                default: Any = Place.empty
                if place.default is not Place.empty:
                    default = getattr(place.default, field.name)
                elif field.default is not MISSING:
                    default = field.default
                elif field.default_factory is not MISSING:
                    default = field.default_factory()
                help = explained.get(field.name)
                yield owner, _option(field.name, theirs[field.name], default, help)
        else:
            kind = place.kind if place.kind is Place.POSITIONAL_ONLY else Place.KEYWORD_ONLY
            yield owner, _option(owner, hints[owner], place.default, helps.get(owner), kind)


def _helps(source: Any) -> dict[str, str]:
    """Return what a docstring says about each argument; of a class also what its bases say."""
    texts = [one.__doc__ or "" for one in reversed(getattr(source, "__mro__", (source,)))]
    told = {one.arg_name: one.description or "" for text in texts for one in parse(text).params}
    return {name: " ".join((words[:1].upper() + words[1:]).split()) for name, words in told.items()}


def _option(
    name: str, hint: Any, default: Any, help: str | None, kind: Any = Place.KEYWORD_ONLY
) -> Place:
    bare = _bare(hint)
    more: dict[str, Any] = {"help": help, "allow_repeating": True}
    if kind is Place.KEYWORD_ONLY:
        more["name"] = flag(name)
    if bare is not bool or default is False:
        more["negative"] = ()
    if not default:
        # A flag that is not given, a word that is not there: nothing to show. A zero is a number.
        more["show_default"] = default == 0 and bare is not bool
    if get_origin(bare) is tuple:
        kinds = (getattr(kind, "__name__", "…") for kind in get_args(bare))
        more |= {"converter": partial(_parted, bare), "metavar": ",".join(kinds).upper()}
        more |= {"show_default": _written} if default else {}
    elif get_origin(bare) is dict:
        more |= {"converter": _decoded, "metavar": "JSON"}
    if "converter" in more or bare is str:
        # One word for cyclopts, which has other ways to write tuples and unions.
        hint = Annotated[(str, *get_args(hint)[1:])] if get_origin(hint) is Annotated else str
    return Place(name, kind, default=default, annotation=Annotated[hint, Parameter(**more)])


def _bare(hint: Any) -> Any:
    """Return a type without its annotations, and without None."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        # What may also be given as an object is written as a word.
        return _bare(kinds[0]) if len(kinds) == 1 else str if str in kinds else hint
    return hint


def _decoded(kind: type[str], tokens: tuple[Token, ...]) -> dict[str, Any]:
    text = tokens[-1].value
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in JSON, got {text!r}")
    return found


def _parted(hint: Any, kind: type[str], tokens: tuple[Token, ...]) -> tuple[Any, ...]:
    text = tokens[-1].value
    try:
        return _tuple(hint, text, ",:")
    except ValueError:
        raise ValueError(
            f"expected {_expected(hint)} with commas between them, got {text!r}"
        ) from None


def _tuple(hint: Any, text: str, separators: str) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.split(separators[0])]
    named = hasattr(hint, "_field_defaults")
    kinds = tuple(get_type_hints(hint).values()) if named else get_args(hint)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(parts)
    least = len(kinds) - (len(hint._field_defaults) if named else 0)
    if not least <= len(parts) <= len(kinds):
        raise ValueError(text)
    found = [_one(kind, part, separators[1:]) for kind, part in zip(kinds, parts, strict=False)]
    return hint(*found) if named else tuple(found)


def _one(kind: Any, part: str, separators: str) -> Any:
    if get_origin(kind) is tuple or hasattr(kind, "_field_defaults"):
        return _tuple(kind, part, separators)
    choices = {"no": False, "yes": True} if kind is bool else {c: c for c in get_args(kind)}
    if choices or not part:
        # An unknown word is a KeyError, and an empty one is nothing to convert.
        if part not in choices:
            raise ValueError(part)
        return choices[part]
    return kind(part)


def _expected(hint: Any) -> str:
    kind, *others = get_args(hint)
    words = {int: "whole numbers", float: "numbers", bool: "yes or no", str: "names"}
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    number = {1: "two "}.get(len([other for other in others if other is not Ellipsis]), "")
    if get_origin(kind) is tuple or hasattr(kind, "_field_defaults"):
        return "numbers as in 128:0.9,512:0.1"
    return number + words.get(kind, kind.__name__)


def _written(value: Any) -> str:
    """Return a tuple as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(
            ":".join(map(str, one)) if isinstance(one, tuple) else
            {True: "yes", False: "no"}[one] if isinstance(one, bool) else str(one)
            for one in value
        )  # fmt: skip
    return str(value)
