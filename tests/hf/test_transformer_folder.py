"""What `tisa.transformer.save` writes is a Hugging Face model, and the other way round."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import tisa.hf  # noqa: F401
from tisa.transformer import LanguageModel, TransformerConfig, load, save

SIZES = dict(vocab_size=13, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             max_position_embeddings=12)  # fmt: skip


@pytest.mark.parametrize("position", ["tisa", "absolute", "t5", "tupe-a", "synthesizer-random"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_classes_read_our_folder(tmp_path, position, is_causal):
    config = TransformerConfig(**SIZES, position=position, is_causal=is_causal, embedding_size=8)
    ours = LanguageModel(config).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    save(ours, tmp_path)
    auto = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
    theirs, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(13, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    expected = ours(ids, attention_mask=mask)
    found = theirs(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(found.logits, expected)
    assert found.loss.isfinite()
    hidden = AutoModel.from_pretrained(tmp_path)(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(hidden, ours.transformer(ids, attention_mask=mask))
    # There and back again.
    theirs.save_pretrained(tmp_path / "again")
    back = load(tmp_path / "again")
    torch.testing.assert_close(back(ids, attention_mask=mask), expected)
    assert AutoConfig.from_pretrained(tmp_path / "again").hidden_size == 16


def test_the_other_kind_and_what_would_be_ignored(tmp_path):
    save(LanguageModel(TransformerConfig(**SIZES)), tmp_path)
    with pytest.raises(ValueError, match="load it with AutoModelForMaskedLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got position_ids"):
        model(torch.zeros(1, 3, dtype=torch.long), position_ids=torch.zeros(1, 3))
