"""The host's part of known calls in C++ (native.cpp), built beside a process that makes many calls.

A compiler needs half a minute, so a process goes on in Python until it is through (`count`); the
next one finds what was built. Results are the same, bit for bit.

What Triton's launcher was given is packed here as the kernel takes it. That is Triton's own affair,
so it is held against what the assembled kernel says of its parameters. Whatever does not fit, or
cannot be built, is told (`state`), and calls are made in Python as before.
"""

import fcntl
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from tisa.ops import repeats
from tisa.ops.triton import launching
from tisa.ops.triton.launching import Described, Place, Template, UnexpectedError

NAME = "tisa_native"
SOURCES = [Path(__file__).with_name(name) for name in ("native.cpp", "native_launch.h")]
# The numbers of data types in a kernel's metadata and in the driver differ in three.
_DRIVERS_TYPE = {8: 10, 9: 8, 10: 9}
_PACKED = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip

# A script that repeats fewer calls is over before a compiler is.
MANY = 200

# What `tisa doctor` says: "not yet", "off", "on", or why not.
state = "not yet: it is built after many calls"
_repeated = 0
_building: threading.Thread | None = None


def switch(on: bool, library: str = "libcuda.so.1") -> bool:
    """Return whether known calls are now made in C++; builds it first, for a minute, where needed.

    Off, it stays off. `library`: the driver.
    """
    global state
    repeats.native, state = None, "off"
    if on and not _start(library):
        warnings.warn(f"tisa: calls are made in Python; C++ is {state}", stacklevel=2)
    return repeats.native is not None


def count(library: str = "libcuda.so.1") -> None:
    """Count a call that Python repeats: after many C++ is built beside it, and then switched on."""
    global _repeated, _building
    if not state.startswith("not yet"):
        return
    _repeated += 1
    if _building is not None:
        if not _building.is_alive():
            _start(library)
    elif _repeated >= MANY:
        # Should the process end before: whoever builds next clears up.
        _building = threading.Thread(target=_try_to_build, name="tisa: C++", daemon=True)
        _building.start()


def _try_to_build() -> None:
    global state
    try:
        built()
    except (OSError, subprocess.SubprocessError) as error:
        # Nobody asked for it, so nobody is warned; `tisa doctor` says it.
        state = f"not to be had: {_shortly(error)}"


def _start(library: str) -> bool:
    """Return whether known calls are now made in C++; `state` says why not."""
    global state
    try:
        module = _loaded(built())
        module.start(library, launching.current_stream, triton.knobs.runtime)
    except (OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:
        state = f"not to be had: {_shortly(error)}"
        return False
    module.forget()
    # Calls that Python repeats would never be made known to C++.
    repeats.forget()
    repeats.native, state = module, "on"
    return True


def _shortly(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(said).splitlines() if "error" in line] or [str(error)]
    return lines[0][:300]


def built() -> Path:
    """Return the extension, built into Triton's cache folder for these versions if it is not there.

    Raises OSError without a compiler, and subprocess.SubprocessError where that fails.
    """
    source = b"".join(path.read_bytes() for path in SOURCES)
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    versions = f"{torch.__version__} {triton.__version__} {suffix}".encode()
    key = hashlib.sha256(source + versions).hexdigest()[:32]
    folder = Path(triton.knobs.cache.dir, f"{NAME}-{key}")
    target = folder / f"{NAME}{suffix}"
    if target.exists():
        return target
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++ or clang++)")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        # Others wait for the one that builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for left in folder.glob("tmp*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                made = Path(fresh, target.name)
                command = [compiler, *_flags(), str(SOURCES[0]), "-o", str(made), *_libraries()]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
                os.replace(made, target)
    return target


def _flags() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    folders = [
        root, root / "torch/csrc/api/include", _python_headers(),
        Path(triton.__file__).parent / "backends/nvidia/include",
    ]  # fmt: skip
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        "-O2", "-std=c++20", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{folder}" for folder in folders),
    ]  # fmt: skip


def _python_headers() -> str:
    # The scheme of Debian's own Python names a folder where none are; Triton builds this way too.
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


def _loaded(path: Path) -> ModuleType:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def pass_of(templates: Sequence[Template], made: Sequence[Tensor]) -> Any | None:
    """Return launches for C++, after which these tensors (as new ones) are filled; None if not."""
    global state
    try:
        launches = [_launch(template) for template in templates]
    except (UnexpectedError, AttributeError) as reason:
        if state == "on":
            state = f"on, but not for all: {reason}"
            warnings.warn(f"tisa: calls are made in Python: {reason}", stacklevel=2)
        return None
    buffers = [tensor if tensor.numel() else None for tensor in made]
    return repeats.native.pass_of(buffers, launches)


def keep(
    told: tuple[object, ...],
    forward: Any,
    saved: Sequence[Tensor],
    seed: Tensor | None,
    slow: Callable[..., Any],
) -> None:
    """Remember a call by its arguments: `saved`: output and statistics; `slow`: its gradients."""
    repeats.native.keep(told, forward, saved, seed, slow)


def _launch(template: Template) -> tuple[Any, ...]:
    """Return a launch as C++ takes it."""
    compiled = template.compiled
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise UnexpectedError("a kernel needs scratch memory of its own")
    descriptors = list(metadata.tensordesc_meta or ())
    packed: list[Any] = []
    for kind, value in zip(compiled.src.signature.values(), template.arguments, strict=True):
        packed += _parameters(kind, value, descriptors)
    sizes = parameter_sizes(compiled.asm["ptx"], metadata.name)
    ours = [_bytes(value) for value in packed]
    rest = sizes[len(ours) :]
    # After the arguments Triton passes addresses of scratch memory, here of none.
    if sizes[: len(ours)] != ours or len(rest) > 2 or any(size != 8 for size in rest):
        raise UnexpectedError(f"a kernel takes parameters of {sizes} bytes, expected {ours}")
    return (
        compiled.function, template.programs, template.rows, metadata.num_warps, metadata.num_ctas,
        metadata.shared, bool(metadata.launch_pdl), bool(metadata.launch_cooperative_grid),
        [*packed, *(bytes(size) for size in rest)],
    )  # fmt: skip


def _parameters(kind: Any, value: Any, descriptors: list[Any]) -> list[Any]:
    """Return an argument of that kind as the kernel takes it, addresses left open."""
    if isinstance(kind, tuple):
        return [x for k, v in zip(kind, value, strict=True) for x in _parameters(k, v, descriptors)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [tuple(value)]
    if kind.startswith("tensordesc"):
        return _descriptor(value, descriptors.pop(0) if descriptors else None)
    if kind not in _PACKED:
        raise UnexpectedError(f"a kernel takes a number of the kind {kind}")
    return [struct.pack(f"={_PACKED[kind]}", value)]


def _descriptor(value: Described, about: Any) -> list[Any]:
    """Return a descriptor, or what stands for it where the GPU has none, and its sizes, strides."""
    place: Place = value.base
    sizes = [struct.pack("=i", size) for size in value.shape]
    strides = [struct.pack("=q", stride) for stride in value.strides]
    padded = value.padding == "nan"
    if about is None:
        wide = [struct.pack("=q", size) for size in value.shape]
        flags = [struct.pack("=b", bool(flag)) for flag in (padded, *value.more.values())]
        return [tuple(place), *wide, *strides, *flags, *sizes, *strides]
    if about["fp4_padded"]:
        raise UnexpectedError("a kernel reads numbers of four bits")
    if any(value.more.values()):
        raise UnexpectedError(f"a kernel reads a tensor with {dict(value.more)}")
    kind, size = about["elem_type"], about["elem_size"]
    # The driver names the last axis first, and knows that its numbers are neighbours.
    steps = [size * stride for stride in reversed(value.strides[:-1])]
    steps.append(value.shape[0] * (steps[-1] if steps else size))
    return [
        (
            *place, _DRIVERS_TYPE.get(kind, kind), about["swizzle"], int(padded),
            list(reversed(value.shape)), steps, list(reversed(about["block_size"])),
        ),
        *sizes, *strides,
    ]  # fmt: skip


def _bytes(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    return 8 if len(value) == 2 else 128


def parameter_sizes(ptx: str, name: str) -> list[int]:
    """Return the bytes of each parameter of a kernel, as it was handed to the assembler."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise UnexpectedError(f"the assembled code has no {name}")
    sizes = []
    for parameter in found[1].split(".param")[1:]:
        array = re.search(r"\.b8\s+\w+\[(\d+)\]", parameter)
        number = re.match(r"\s*\.[a-z](\d+)", parameter)
        if array is None and number is None:
            raise UnexpectedError(f"a parameter reads {parameter.strip()}")
        sizes.append(int(array[1]) if array else int(number[1]) // 8)  # type: ignore[index]
    return sizes
