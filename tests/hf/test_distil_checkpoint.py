"""A distillation's checkpoint is whole and of this distillation, or it is not taken."""

import pytest
import torch

import tisa.hf
from tiny import original, token_lists
from tisa.store import Damaged

TOKENS = token_lists(4)


@pytest.fixture(scope="module")
def model():
    return original("bert")


@pytest.fixture(scope="module")
def whole(model):
    return distil(model, None)


def distil(model, file, steps=22, **settings):
    """Return the scores after so many steps, gone on from the file if it is there."""
    torch.manual_seed(3)
    converted = tisa.hf.convert(model, init="reference", calibration=TOKENS)
    # The search on held-out texts goes on in test_distilling_goes_on_where_it_stopped.
    settings = {"seed": 0, "check": False, "progress": lambda told: None, **settings}
    tisa.hf.distil(converted, model, TOKENS, steps=steps, checkpoint=file, **settings)
    return torch.cat([p.detach().flatten() for p in converted.parameters()])


def interrupted(model, file, at=21):
    def stop(told):
        if told.step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distil(model, file, progress=stop)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 40, 600, 5000, -1])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(place, model, whole, tmp_path):
    file = tmp_path / "distil.pt"
    interrupted(model, file, at=21)
    flip(file, place)
    with pytest.warns(UserWarning, match=r"distil.pt: .*; goes on from .*distil.pt.before"):
        assert torch.equal(distil(model, file), whole)


def test_with_nothing_before_it_a_damaged_checkpoint_is_refused(model, tmp_path):
    file = tmp_path / "distil.pt"
    interrupted(model, file, at=11)
    flip(file, 5000)
    with pytest.raises(Damaged, match=r"distil.pt: not as it was written"):
        distil(model, file)


def test_killed_between_both_files_it_goes_on_from_the_one_before(model, whole, tmp_path):
    file = tmp_path / "distil.pt"
    interrupted(model, file, at=21)
    file.unlink()
    with pytest.warns(UserWarning, match=r"goes on from .*distil.pt.before"):
        assert torch.equal(distil(model, file), whole)


@pytest.mark.parametrize("other", [{"seed": 1}, {"scores_lr": 0.01}, {"batch_tokens": 64}])
def test_a_checkpoint_of_another_distillation_is_refused(other, model, tmp_path):
    file = tmp_path / "distil.pt"
    distil(model, file, steps=10)
    with pytest.raises(ValueError, match="of another model, other texts or another seed"):
        distil(model, file, **other)


def test_a_checkpoint_of_before_has_no_checksum_and_is_taken(model, whole, tmp_path):
    file = tmp_path / "distil.pt"
    interrupted(model, file, at=11)
    content = file.read_bytes()
    file.write_bytes(content[content.index(b"\n") + 1 :])
    assert torch.equal(distil(model, file), whole)
