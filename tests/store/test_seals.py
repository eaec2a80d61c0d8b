"""A checksum inside what it is of."""

import json

import pytest
import torch

from tisa import store

VALUES = {"name": "ä", "loss": 3.25e-7, "large": 2**60, "list": [1.0, None, True], "in": {"b": 1}}
AGAIN = "make it again"


def test_what_is_sealed_is_opened(tmp_path):
    assert store.opened(store.sealed(VALUES), "here", remedy=AGAIN) == VALUES
    store.write_json(tmp_path / "a.json", VALUES)
    assert store.read_json(tmp_path / "a.json", remedy=AGAIN) == VALUES
    # Sealed once, however often it is written.
    assert store.sealed(store.sealed(VALUES)) == store.sealed(VALUES)


def test_what_has_no_seal_is_of_before(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(VALUES))
    assert store.read_json(tmp_path / "a.json", remedy=AGAIN) == VALUES


def test_another_order_and_other_spaces_are_the_same(tmp_path):
    again = dict(reversed(store.sealed(VALUES).items()))
    (tmp_path / "a.json").write_text(json.dumps(again, indent=7))
    assert store.read_json(tmp_path / "a.json", remedy=AGAIN) == VALUES


@pytest.mark.parametrize("lost", ["sealed", "sha256", "loss"])
def test_half_a_seal_is_none(lost):
    values = store.sealed(VALUES)
    del values[lost]
    with pytest.raises(store.Damaged, match=r"^here: not as it was written.*; make it again$"):
        store.opened(values, "here", remedy=AGAIN)


def test_a_newer_seal_is_told():
    values = store.sealed(VALUES)
    newer = values | {"sealed": 2}
    del newer["sha256"]
    from tisa.store.seals import _digest

    with pytest.raises(ValueError, match=r"format 2.*upgrade tisa"):
        store.opened(newer | {"sha256": _digest(newer)}, "here", remedy=AGAIN)


def test_what_is_no_json_object_is_damaged(tmp_path):
    for content in (b"", b"{", b"[1]", b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(store.Damaged, match=r"a.json: no JSON"):
            store.read_json(tmp_path / "a.json", remedy=AGAIN)


def test_every_flipped_bit_in_sealed_bytes_is_found(tmp_path):
    path, content = tmp_path / "a.bin", bytes(range(64))
    store.write_sealed(path, {"kind": "test"}, content)
    assert store.read_bytes(path, remedy=AGAIN) == ({"kind": "test"}, content)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(store.Damaged, match=r"a.bin"):
                store.read_bytes(path, remedy=AGAIN)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length > len(b"{"):
            with pytest.raises(store.Damaged, match=r"a.bin"):
                store.read_bytes(path, remedy=AGAIN)


def test_bytes_of_before_are_read_as_they_are(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04 and so on")
    assert store.read_bytes(tmp_path / "a.pt", remedy=AGAIN) == ({}, b"PK\x03\x04 and so on")


def test_the_digest_of_tensors_knows_all_of_them():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    known = store.tensors_digest(tensors)
    assert known == store.tensors_digest(dict(reversed(tensors.items())))
    assert known == store.tensors_digest({**tensors, "a": tensors["a"].t().contiguous().t()})
    changed = [
        {"a": tensors["a"]},
        {"c": tensors["a"], "b": tensors["b"]},
        {**tensors, "a": tensors["a"].reshape(3, 2)},
        {**tensors, "a": tensors["a"].double()},
        {**tensors, "b": -tensors["b"]},
    ]
    assert len({known, *map(store.tensors_digest, changed)}) == 6
