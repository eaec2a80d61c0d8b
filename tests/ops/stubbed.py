"""Triton's own launcher on a machine without a GPU: a driver that tells of every launch.

For a process of its own, in which Triton does not interpret: `with stubbed() as launches`. What
the driver is given is read by the sizes of parameters that stand in the assembled kernel.
"""

import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia.driver as nvidia

from tisa.ops import triton as backend
from tisa.ops.triton import launching
from tisa.scoring import layers

INCLUDE = Path(nvidia.__file__).parent / "include"
# The address of the stream that is the current one.
STREAM = 7
_TOLD = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


class Launched(NamedTuple):
    """What the driver was given."""

    function: int
    # Grid, block, bytes of shared memory.
    sizes: tuple[int, ...]
    stream: int
    # Of each its number and its value.
    attributes: list[tuple[int, bytes]]
    parameters: list[bytes]


def parameter_sizes(cubin: bytes) -> list[int]:
    """Return the bytes of each parameter of the one kernel, as its assembler wrote them down."""
    # Records of the section .nv.info: format 4, attribute 0x17 (KPARAM_INFO), 12 bytes.
    # They follow each other, the last parameter first; the same bytes may stand elsewhere too.
    sizes: list[int] = []
    at = -1
    while not sizes:
        at = cubin.index(b"\x04\x17\x0c\x00", at + 1)
        last = struct.unpack_from("<H", cubin, at + 8)[0]
        records = [struct.unpack_from("<IIHHI", cubin, at + 16 * i) for i in range(last + 1)]
        if [ordinal for _, _, ordinal, _, _ in records] == list(range(last, -1, -1)):
            sizes = [packed >> 18 for *_, packed in reversed(records)]
    return sizes


@contextmanager
def stubbed() -> Iterator[SimpleNamespace]:
    """Let this process launch on tensors of the CPU, and note each launch in `.launches`."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        command = ["gcc", "-shared", "-fPIC", "-w", f"-I{INCLUDE}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(
            [*command, "-o", library, Path(__file__).with_name("stub_driver.c")], check=True
        )
        # Loaded by this name, it is what Triton's launcher opens afterwards.
        stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        triton.knobs.nvidia.libcuda_path = folder
        driver: Any = nvidia.CudaDriver()
        driver.get_device_capability = lambda *_: (9, 0)
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda _: STREAM
        triton.runtime.driver.set_active(driver)
        sizes: dict[int, list[int]] = {}
        load = driver.utils.load_binary

        def loaded(name: str, cubin: bytes, *more: Any) -> Any:
            found = load(name, cubin, *more)
            sizes[found[1]] = parameter_sizes(cubin)
            return found

        driver.utils.load_binary = loaded
        noted = SimpleNamespace(launches=[], library=str(library), answer=0)

        def told(config: int, function: int, parameters: Any) -> int:
            noted.launches.append(_read(config, function, parameters, sizes[function]))
            return noted.answer

        callback = _TOLD(told)
        stub.stub_tell(callback)
        noted.quiet = lambda: stub.stub_tell(None)
        backend.DEVICES = ("cpu",)
        layers.GPUS = ("cpu",)
        launching.compiles = lambda device: True
        launching.current_stream = lambda device: STREAM
        yield noted


def _read(config: int, function: int, parameters: Any, sizes: list[int]) -> Launched:
    # CUlaunchConfig: seven numbers, the stream, the attributes and how many.
    *seven, _, stream, attributes, count = struct.unpack("<8IQQI", ctypes.string_at(config, 52))
    # An attribute is 72 bytes in all versions: a number, a gap, and a value of 64.
    raw = [ctypes.string_at(attributes + 72 * i, 72) for i in range(count)]
    found = [(int.from_bytes(one[:4], "little"), one[8:]) for one in raw]
    values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
    return Launched(function, tuple(seven), stream, found, values)
