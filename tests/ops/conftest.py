"""Triton's interpreter, a quarter faster.

It puts its own functions into the language when a kernel is launched, and again for every call of a
device function in it, to which they are there already.
"""

from functools import cache

import pytest

from tisa.ops import triton as backend


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once():
    if not backend.interpreted():
        yield
        return
    from triton.runtime import interpreter

    patch, seen = interpreter._patch_lang, set()
    languages = (interpreter.tl, interpreter.tl.core)

    @cache
    def needed(fn):
        # Some functions of Triton's own know the language's core alone.
        return {v.__name__ for v in fn.__globals__.values() if any(v is one for one in languages)}

    def once(fn):
        if seen and needed(fn) <= seen:
            return None
        first = not seen
        seen.update(needed(fn))
        scope = patch(fn)
        if first:
            restore, scope.restore = scope.restore, lambda: (seen.clear(), restore())
        return scope

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", once)
        yield
