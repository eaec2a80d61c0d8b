"""Known calls in C++: built where they can be, told where not, and the same as in Python."""

import json
import stat
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the fused backend's launches")

import triton

from test_launch import lines_of
from tisa.ops import repeats
from tisa.ops.triton import native
from tisa.ops.triton.launching import Described, Group, Place, Template, UnexpectedError

PTX = """
.visible .entry every_kind(
	.param .align 64 .b8 every_kind_param_0[128],
	.param .u64 .ptr .global .align 1 every_kind_param_1,
	.param .f32 every_kind_param_2,
	.param .u32 every_kind_param_3
)
.reqntid 64
{
"""


@pytest.fixture(autouse=True)
def off(monkeypatch, tmp_path):
    """Nothing is on before and after, and nothing is built yet."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "state", "not yet")
    monkeypatch.setattr(native, "_repeated", 0)
    monkeypatch.setattr(native, "_building", None)
    monkeypatch.setattr(repeats, "native", None)


def test_without_a_compiler_calls_are_made_in_python(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="made in Python; C\\+\\+ is not to be had: no C\\+\\+"):
        assert not native.switch(True)
    assert repeats.native is None
    assert native.state == "not to be had: no C++ compiler (g++ or clang++)"
    assert not native.switch(False)
    assert native.state == "off"


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\necho 'warning: rain' >&2\necho 'x.h: fatal error: no sun' >&2\nexit 1\n"
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(compiler))
    with pytest.warns(UserWarning, match="no sun"):
        assert not native.switch(True)
    assert native.state == "not to be had: x.h: fatal error: no sun"


def test_what_cannot_be_loaded_is_told(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    # Writes nonsense to what stands after -o, and counts.
    compiler.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "open(sys.argv[sys.argv.index('-o') + 1], 'w').write('no')\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(compiler))
    for _ in range(2):
        with pytest.warns(UserWarning, match="not to be had"):
            assert not native.switch(True)
    # Built once.
    assert (tmp_path / "calls").read_text() == "x"


def test_many_calls_have_it_built_beside_them(monkeypatch):
    built, loaded, going_on = [], [], threading.Event()
    monkeypatch.setattr(native, "built", lambda: going_on.wait(60) and built.append(True))
    module = SimpleNamespace(start=lambda *told: loaded.append(told[0]), forget=lambda: None)
    monkeypatch.setattr(native, "_loaded", lambda path: module)
    for _ in range(native.MANY - 1):
        native.count()
    assert native._building is None
    native.count()
    native.count()
    # The calls go on in Python while a compiler works.
    assert native._building.is_alive()
    assert (repeats.native, loaded) == (None, [])
    going_on.set()
    native._building.join()
    native.count("a driver")
    assert repeats.native is module
    assert (native.state, loaded) == ("on", ["a driver"])
    native.switch(False)
    native.count()
    assert (repeats.native, native.state) == (None, "off")


def test_nobody_is_warned_of_what_nobody_asked_for(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    for _ in range(native.MANY):
        native.count()
    native._building.join()
    native.count()
    assert native.state == "not to be had: no C++ compiler (g++ or clang++)"
    assert repeats.native is None


def test_what_a_process_that_ended_left_is_cleared(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho so > "$2"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(compiler))
    left = native.built().parent / "tmpleft"
    native.built().unlink()
    left.mkdir()
    assert native.built().read_text() == "so\n"
    assert not left.exists()


def test_a_kernel_says_what_it_takes():
    assert native.parameter_sizes(PTX, "every_kind") == [128, 8, 4, 4]
    with pytest.raises(UnexpectedError, match="no other_kind"):
        native.parameter_sizes(PTX, "other_kind")
    with pytest.raises(UnexpectedError, match="a parameter reads"):
        native.parameter_sizes(PTX.replace(".f32", ".surfref"), "every_kind")


def template(ptx, **changed):
    """Return a launch of the kernel above."""
    metadata = {
        "name": "every_kind", "num_warps": 2, "num_ctas": 1, "shared": 64, "launch_pdl": False,
        "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0,
        "tensordesc_meta": [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64],
                             "fp4_padded": False}],
    } | changed  # fmt: skip
    signature = {"key": "tensordesc<bf16[1, 64]>", "group": ("*fp32", "constexpr"), "scale": "fp32"}
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature),
        asm={"ptx": ptx}, function=77,
    )  # fmt: skip
    described = Described(Place(1, 32), [4, 64], [128, 1], "zero")
    arguments = Group((described, Group((Place(0, 0), 1)), 0.5))
    return Template(print, 9, (77, None, None, None, None), arguments, compiled)


TAKES = """.entry every_kind(
 .param .align 64 .b8 a[128], .param .u32 b, .param .u32 c, .param .u64 d, .param .u64 e,
 .param .u64 f, .param .f32 g, .param .u64 h, .param .u64 i)"""


def test_a_launch_is_packed_as_the_kernel_takes_it():
    function, *numbers, parameters = native._launch(template(TAKES))
    assert (function, *numbers) == (77, 9, 1, 2, 1, 64, False, False)
    descriptor, rows, width, row, column, group, scale, *scratch = parameters
    # bfloat16 is the driver's ninth kind; sizes, strides, tiles begin with the last axis.
    assert descriptor == (1, 32, 9, 3, 0, [64, 4], [256, 1024], [64, 1])
    assert [int.from_bytes(x, "little") for x in (rows, width, row, column)] == [4, 64, 128, 1]
    assert group == (0, 0)
    assert scale == b"\x00\x00\x00\x3f"
    assert scratch == [bytes(8), bytes(8)]


@pytest.mark.parametrize(
    ("ptx", "changed", "reason"),
    [
        (TAKES.replace(".f32", ".f64"), {}, "takes parameters of"),
        (TAKES.replace(", .param .u64 i", ""), {"global_scratch_size": 128}, "scratch memory"),
        (TAKES.replace("i)", "i, .param .u64 j)"), {}, "takes parameters of"),
        (TAKES, {"tensordesc_meta": [{"fp4_padded": True}]}, "four bits"),
    ],
)
def test_a_kernel_that_is_not_as_expected_is_told_once(monkeypatch, ptx, changed, reason):
    monkeypatch.setattr(native, "state", "on")
    with pytest.warns(UserWarning, match=reason):
        assert native.pass_of([template(ptx, **changed)], []) is None
    assert reason in native.state
    # Once: here a warning is an error.
    assert native.pass_of([template(ptx, **changed)], []) is None


@pytest.mark.full
def test_autograd_sees_what_it_sees_in_python():
    assert len(lines_of("native_process.py")) == 14


@pytest.mark.full
def test_the_driver_is_given_what_triton_gives_it():
    assert len(lines_of("call_process.py", "Python,C++")) == 10


@pytest.mark.full
def test_the_benchmark_of_the_host_runs(tmp_path):
    small = ("--tokens", "128", "--layers", "2", "--rounds", "3", "--steps", "3")
    lines = lines_of("host_process.py", *small, "--out", str(tmp_path))
    assert lines[0].startswith("C++: on")
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("*-host.json")]
    assert set(record["steps"]["128"]) == {"stock", "converted", "converted, C++"}
    for rates in record["caches"]["one length"].values():
        assert rates["hits"] > 0
        assert rates["misses"] == 0
