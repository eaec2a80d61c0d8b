"""What a person calls a method, and which class that is: the one place that knows all forms.

    "rotary"                   a name of `METHODS`, or a synonym ("nope")
    "mine"                     a class given to `register`, or an entry point of `tisa.positions`
    "my_file.py:Mine"          a class in a file, which is run
    "tisa:layers=shared"       any of them with options
    "rotary+none"              a mixture: several named ones, layer by layer; also a list of them
    Mine                       a class: a `Position`, or a `ScoringFunction`, which becomes one

`resolve` is for what a person gave. What stands in a saved model goes through `recalled`, which
runs nothing.
"""

import difflib
import inspect
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from tisa.positions.base import Position, PositionConfig
from tisa.positions.sources import Source, class_in_file, is_own, present
from tisa.scoring import ScoringFunction

# What a position method may be given as.
Given = str | type[nn.Module]
Asked = Given | Sequence[Given]
# What a saved model says of classes that are none of this package; of a mixture, of each method.
Told = Mapping[str, str] | Sequence[Mapping[str, str] | None]
GROUP = "tisa.positions"
# Between two methods of a mixture. Not the + of 1e+16.
BETWEEN = re.compile(r"(?<![\d.][eE])\+")
# Names that people search for, and ours for the same.
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {"nope": "none", "nearfar": "near-far", "nearfar-fox": "near-far-fox"}
)
REGISTERED: dict[str, type[nn.Module]] = {}


class Method(NamedTuple):
    """Where a method is, the options that its name stands for, and other defaults than its own.

    `cls` is the name of a class in a file beside this one, or a class of somebody's.
    """

    file: str
    cls: str | type[nn.Module]
    options: Mapping[str, Any] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})

    def load(self) -> type[Position]:
        """Return the class."""
        if isinstance(self.cls, str):
            module = import_module(f"tisa.positions.{self.file.removesuffix('.py')}")
            found: type[Position] = getattr(module, self.cls)
            return found
        assert issubclass(self.cls, Position)
        return self.cls

    def known(self, cls: type[Position]) -> set[str] | None:
        """Return the names of the options that a user may give; None: the class takes any."""
        taken = dict(inspect.signature(cls).parameters)
        if "function" in self.options:
            del taken["options"]
            taken |= inspect.signature(self.options["function"]).parameters
            for name in ("num_attention_heads", *self.options["decoder"]):
                taken.pop(name, None)
        kinds = {place.kind for place in taken.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return None
        return set(taken) - {"config", *self.options}


class Chosen(NamedTuple):
    """A method that was asked for.

    `given` is what it was called, without options, and `position` the name or the class that it
    is; they differ for a class in a file. `source` says where a class that is none of this package
    came from.
    """

    given: Given
    position: Given
    method: Method
    options: dict[str, Any]
    source: Source | None = None

    @property
    def name(self) -> str:
        """Its name, as a record and a saved model have it."""
        if isinstance(self.position, str):
            return self.position
        assert self.source is not None
        return f"{self.source.place}:{self.source.cls}"

    @property
    def label(self) -> str:
        """Its name with the options that were given in it."""
        return ":".join([self.name, *(f"{k}={json.dumps(v)}" for k, v in self.options.items())])

    @property
    def causal_only(self) -> str | None:
        """Why it cannot be in an encoder, None where it can."""
        members = self.method.options.get("members", ())
        reasons = [member.causal_only for member in members]
        return next(filter(None, reasons), self.method.load().causal_only)

    def check_encoder(self, what: str) -> None:
        """Refuse a method that cannot be in an encoder, where encoders are compared."""
        if self.causal_only is not None:
            raise ValueError(
                f"{what} must be of encoders, which are compared here, got {self.name}, which is "
                f"for decoders: {self.causal_only}"
            )

    @property
    def scoring(self) -> type[ScoringFunction] | None:
        """The function of the offset that it is, None for all other methods."""
        found: type[ScoringFunction] | None = self.method.options.get("function")
        return found


def build(chosen: Chosen, config: PositionConfig) -> Position:
    """Return the method that was chosen, with `config.options` as its keyword arguments."""
    method, options = chosen.method, {**config.options, **chosen.options}
    cls = method.load()
    known = method.known(cls)
    unknown = sorted(set(options) - known) if known is not None else []
    if unknown and "members" in method.options:
        raise ValueError(
            f"options of position {chosen.name!r} must stand with its methods, as in "
            f"rotary:base=160000+none, got {', '.join(unknown)} for all of them"
        )
    if unknown:
        raise ValueError(
            f"options of position {chosen.name!r} must be among "
            f"{', '.join(sorted(known or ())) or 'none'}, got {', '.join(unknown)}"
        )
    built: Position = cls(config, **method.options, **{**method.defaults, **options})
    return built


def of_offset(
    function: type[ScoringFunction],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    decoder: Mapping[str, Any] = MappingProxyType({}),
) -> Method:
    """Return the method that adds this function of the offset in every layer."""
    fixed = {"function": function, "decoder": decoder}
    return Method("from_scoring.py", "FromScoring", fixed, defaults)


def register(name: str, cls: type[nn.Module], methods: Mapping[str, Method]) -> None:
    """Make a class known by a name, in this process, wherever a method's name is taken."""
    if not isinstance(name, str) or not name or set(name) & set(":,=/+ ") or name.endswith(".py"):
        raise ValueError(
            "register: name must be a word without spaces, commas, colons, slashes and plus signs, "
            f"got {name!r}"
        )
    if not is_own(cls):
        raise TypeError(f"register: cls must be {_classes()}, got {cls!r}")
    taken: object = methods.get(SYNONYMS.get(name, name), REGISTERED.get(name, cls))
    # The cell of a notebook that is run again defines the same class anew.
    if not (isinstance(taken, type) and _told(taken) == _told(cls)):
        raise ValueError(f"register: name {name!r} is that of {taken!r}; take another one")
    REGISTERED[name] = cls


def resolve(given: Asked, methods: Mapping[str, Method], *, what: str = "position") -> Chosen:
    """Return the method that a person asked for, or say what was looked for; `what` named it."""
    parts = mixed(given) if isinstance(given, str) else given
    if isinstance(parts, (list, tuple)) and (len(parts) > 1 or not isinstance(given, str)):
        return _mixture(parts, methods, what)
    if isinstance(given, type):
        return _of_class(given, methods, what)
    if not isinstance(given, str):
        raise TypeError(f"{what} must be a name, my_file.py:Class, or {_classes()}, got {given!r}")
    name, cls, options = _parted(given, what)
    if cls is not None:
        found = class_in_file(name, cls, what)
        given = f"{name}:{cls}"
        return _of_class(found, methods, what)._replace(given=given, options=options)
    name = SYNONYMS.get(name, name)
    if name in methods:
        return Chosen(name, name, methods[name], options)
    known = REGISTERED.get(name) or _entry_point(name)
    if known is None:
        near = difflib.get_close_matches(name, [*methods, *REGISTERED], n=3, cutoff=0.5)
        points = ", ".join(sorted(entry_points(group=GROUP).names)) or "none"
        raise ValueError(
            f"{what} must be among {', '.join(methods)}, the classes given to tisa.register "
            f"({', '.join(REGISTERED) or 'none'}) and the entry points {GROUP} ({points}), or a "
            f"class in a file (my_file.py:Class), got {name!r}"
            f"{'; did you mean ' + ' or '.join(near) + '?' if near else ''}"
        )
    return _of_class(known, methods, what)._replace(given=name, position=name, options=options)


def canonical(text: str) -> str:
    """Return a method as written, with our own name where it was called by a synonym.

    For what tells methods apart by what they are called: the same one under two names is one.
    """
    found = [part.partition(":") for part in mixed(text)]
    return "+".join(SYNONYMS.get(name, name) + colon + rest for name, colon, rest in found)


def mixed(text: str) -> list[str]:
    """Return the methods of a mixture as written, one of any other method."""
    path, colon, _ = text.partition(".py:")
    # A file in a folder whose name has the sign.
    if colon and "+" in path and Path(f"{path}.py").expanduser().is_file():
        return [text]
    return BETWEEN.split(text)


def _mixture(parts: Sequence[Given], methods: Mapping[str, Method], what: str) -> Chosen:
    """Return the method that is these, layer by layer; one alone is itself."""
    if not parts:
        raise ValueError(f"{what} must name a method for the first layer at least, got none")
    members = [resolve(part, methods, what=what) for part in parts]
    if len(members) == 1:
        return members[0]
    for member in members:
        if not isinstance(member.position, str) or "members" in member.method.options:
            raise ValueError(
                f"{what}: a mixture must be of methods with names, got {member.name}; "
                'tisa.register("mine", Mine) gives a class one'
            )
    name = "+".join(member.label for member in members)
    return Chosen(name, name, Method("mixture.py", "Mixture", {"members": tuple(members)}), {})


def recalled(
    name: str,
    told: Told | None,
    given: Asked | None,
    methods: Mapping[str, Method],
    *,
    what: str = "position",
) -> Given:
    """Return what stands for the method that a saved model names; its file is not run.

    `told` is the `Source` of its class, None for a method of this package; `given` what the person
    who loads it says that it is.
    """
    if not isinstance(told, Mapping) and len(mixed(name)) > 1:
        _recall_members(name, told, methods, what)
        # Its methods have names here, or were refused: it is found again by its own.
        if given is not None and resolve(given, methods, what=what).position != name:
            raise ValueError(f"{what} must be None, or {name!r}, got {given!r}")
        return name
    assert told is None or isinstance(told, Mapping)
    chosen = None if given is None else resolve(given, methods, what=what)
    if told is None:
        if name not in methods:
            raise ValueError(
                f"{what}: the saved model names {name!r}, which is no method of this package; "
                "written by a newer version?"
            )
        if chosen is not None and chosen.position != name:
            raise ValueError(
                f"{what} must be None, or {name!r}, which the model was made with, got {given!r}"
            )
        return name
    if set(told) != {part.name for part in fields(Source)}:
        raise ValueError(f"{what}: the saved model must say where {name!r} came from, got {told!r}")
    source = Source(**told)
    if chosen is None:
        found = REGISTERED.get(name) or _entry_point(name) or present(source)
        if found is None:
            raise ValueError(
                f"{what}: the model was made with {source.told()}, which is no part of tisa and "
                "not known here, and no file is run because a model names it; import it before "
                f"loading, or pass it: {what}={source.cls}, or "
                f'{what}="path/to/{source.file or "my_file.py"}:{source.cls}"'
            )
        chosen = _of_class(found, methods, what)
    _compare(source, chosen, what)
    # By its name where it has one here, so that it is saved under it again.
    known = name in REGISTERED or _entry_point(name) is not None
    return name if known and given is None else chosen.position


def _recall_members(
    name: str,
    told: Sequence[Mapping[str, str] | None] | None,
    methods: Mapping[str, Method],
    what: str,
) -> None:
    """Refuse a mixture that was saved with a method which is not known here by its name."""
    parts = [_parted(part, what)[0] for part in mixed(name)]
    each = [None] * len(parts) if told is None else told
    keys = {part.name for part in fields(Source)}
    if len(each) != len(parts) or any(one is not None and set(one) != keys for one in each):
        raise ValueError(f"{what}: the saved model must say where {name!r} came from, got {told!r}")
    for part, one in zip(parts, each, strict=True):
        if one is not None and part not in REGISTERED and _entry_point(part) is None:
            raise ValueError(
                f"{what}: the model was made with {Source(**one).told()} under the name {part!r}, "
                f"which is not known here; tisa.register({part!r}, …) before loading"
            )
        recalled(part, one, None, methods, what=what)


def described(chosen: Chosen) -> Told | None:
    """Return what a saved model says of the method's class, None for those of this package."""
    members = [described(member) for member in chosen.method.options.get("members", ())]
    if any(members):
        return members  # type: ignore[return-value]
    return None if chosen.source is None else asdict(chosen.source)


def _compare(source: Source, chosen: Chosen, what: str) -> None:
    """Say that the class, or the file that it stands in, is another than it was."""
    own = chosen.source
    if own is None or own.cls != source.cls:
        other = chosen.name if own is None else own.told()
        warnings.warn(
            f"{what}: the model was made with {source.told()}, and is loaded with {other}",
            stacklevel=4,
        )
    elif own.sha256 != source.sha256:
        warnings.warn(
            f"{what}: {own.place} has changed since the model was made with {source.told()}; "
            f"its SHA-256 is {own.sha256[:12] or 'not known'}… now; it may compute something else",
            stacklevel=4,
        )


def _parted(text: str, what: str) -> tuple[str, str | None, dict[str, Any]]:
    """Return the name or file, the class in the file, and the options of a method as written."""
    name, colon, rest = text.partition(".py:")
    cls = None
    if colon:
        name += ".py"
        cls, *parts = rest.split(":")
    else:
        name, *parts = text.split(":")
        if name.endswith(".py"):
            raise ValueError(f"{what}: expected a class of {name}, as {name}:Class, got {text!r}")
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{what}: expected a method as name:option=value, got {text!r}")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return name, cls, options


def _of_class(cls: type[nn.Module], methods: Mapping[str, Method], what: str) -> Chosen:
    if not is_own(cls):
        raise TypeError(f"{what} must be {_classes()}, got {cls!r}")
    for name, method in methods.items():
        # A class of this package by its name; a method that is a class with options is not it.
        place = f"tisa.positions.{method.file.removesuffix('.py')}"
        whole = (cls.__module__, cls.__name__) == (place, method.cls) and not method.options
        if whole or method.options.get("function") is cls:
            return Chosen(name, name, method, {})
    method = of_offset(cls) if issubclass(cls, ScoringFunction) else Method("", cls)
    return Chosen(cls, cls, method, {}, Source.of(cls))


def _entry_point(name: str) -> type[nn.Module] | None:
    """Return the class that an installed package declares under that name, or None."""
    for point in entry_points(group=GROUP, name=name):
        found: type[nn.Module] = point.load()
        return found
    return None


def _told(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _classes() -> str:
    return "a class that is a tisa.Position or a tisa.ScoringFunction"
