"""Somebody's own class: run out of a file that a person named, and where it came from.

A file is run by `class_in_file` alone, which is called with what a person wrote in Python or on a
command line. What a saved model says of its method is a `Source`: it is compared with the classes
that this process has already, and never followed.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from tisa.positions.base import Position
from tisa.scoring.base import ScoringFunction

KINDS = (Position, ScoringFunction)
# The attribute of a module that was run here: the SHA-256 of what was run.
DIGEST = "_tisa_sha256"


@dataclass(frozen=True)
class Source:
    """Where a class came from: its name, its module, its file's name and SHA-256 ("": none)."""

    cls: str
    module: str
    file: str
    sha256: str

    @classmethod
    def of(cls, found: type[nn.Module]) -> "Source":
        """Return where a class came from, as it was when that was first asked.

        Its file may change while the class is used, and what is computed is the class.
        """
        known = _KNOWN.get(found)
        if known is None:
            known = _KNOWN[found] = cls._of(found)
        return known

    @classmethod
    def _of(cls, found: type[nn.Module]) -> "Source":
        module = sys.modules.get(found.__module__)
        name, path = found.__module__, _file_of(found)
        digest = getattr(module, DIGEST, "")
        if digest or name == "__main__":
            # No name under which it could be imported: a file that was run.
            name = path.stem if path else ""
        if path and not digest:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(found.__qualname__, name, path.name if path else "", digest)

    @property
    def place(self) -> str:
        """The file, else the module, as a person would name it."""
        return self.file or self.module or "an interactive session"

    def told(self) -> str:
        """Return the class and its place in words."""
        digest = f" (SHA-256 {self.sha256[:12]}…)" if self.sha256 else ""
        return f"{self.cls} of {self.place}{digest}"


_KNOWN: WeakKeyDictionary[type[nn.Module], Source] = WeakKeyDictionary()


def class_in_file(path: str, name: str, what: str = "position") -> type[nn.Module]:
    """Return the class of that name in a file, which is run for it, once for each content.

    Modules that lie beside the file can be imported by it.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{what}: looked for the class {name} in the file {path}, which is not there (from "
            f"{Path.cwd()}); write path/to/my_file.py:Class"
        )
    file = file.resolve()
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    place = hashlib.sha256(str(file).encode()).hexdigest()
    known = f"{file.stem.replace('.', '_')}_{place[:8]}_{digest[:8]}"
    module = sys.modules.get(known)
    if module is None:
        module = ModuleType(known)
        module.__file__ = str(file)
        setattr(module, DIGEST, digest)
        # Known by its name, without which its classes could not be pickled.
        sys.modules[known] = module
        sys.path.insert(0, str(file.parent))
        try:
            exec(compile(content, str(file), "exec"), vars(module))
        except BaseException as wrong:
            del sys.modules[known]
            if not isinstance(wrong, Exception):
                raise
            said = f"{type(wrong).__name__}: {wrong}".splitlines()[0]
            raise ValueError(f"{what}: {path} could not be run ({said})") from wrong
        finally:
            sys.path.remove(str(file.parent))
    found = getattr(module, name, None)
    if not is_own(found):
        others = [n for n, v in vars(module).items() if is_own(v) and v.__module__ == known]
        raise ValueError(
            f"{what}: looked in {path} for a class {name} that is a tisa.Position or a "
            f"tisa.ScoringFunction, found {'none' if found is None else repr(found)}; such "
            f"classes in it: {', '.join(others) or 'none'}"
        )
    return cast(type[nn.Module], found)


def is_own(found: Any) -> bool:
    """Return whether something is a class of position methods, and not their base itself."""
    return isinstance(found, type) and issubclass(found, KINDS) and found not in KINDS


def present(source: Source) -> type[nn.Module] | None:
    """Return the class that this process has from there, or None; nothing is imported or run.

    Of several the one of the same content, else the one that was defined last.
    """
    found = [
        (other.sha256 == source.sha256, number, cls)
        for number, cls in enumerate(_alive(*KINDS))
        if cls.__qualname__ == source.cls
        and (other := Source.of(cls)).module == source.module
        and other.file == source.file
    ]
    return max(found, key=lambda one: one[:2])[2] if found else None


def _alive(*kinds: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for kind in kinds:
        for cls in kind.__subclasses__():
            yield cls
            yield from _alive(cls)


def _file_of(found: type[nn.Module]) -> Path | None:
    """Return the file in which a class stands, None in an interactive session."""
    try:
        name = inspect.getsourcefile(found)
    except (TypeError, OSError):
        return None
    path = Path(name) if name else None
    return path if path and path.is_file() else None
