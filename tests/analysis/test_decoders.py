"""Decoders are analysed where they look: on keys up to the query."""

import pytest
import torch

from little_models import model_of
from tisa.analysis import analyze, numbers_of
from tisa.analysis.curves import read_curves
from tisa.analysis.figures import figures_of
from tisa.analysis.page.packing import packed_model
from tisa.weights import read_checkpoint


@pytest.mark.parametrize(
    "family", ["BERT", "BERT as decoder", "GPT-2", "OPT", "GPT-BigCode", "tisa.transformer"]
)
def test_curves_of_decoders_end_at_0(family, tmp_path):
    """No query sees a later key: what f(k) would be there is nobody's."""
    import tisa.hf
    import tisa.transformer

    causal = family != "BERT"
    if family == "tisa.transformer":
        config = tisa.TransformerConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            position="tisa", is_causal=True,
        )  # fmt: skip
        tisa.transformer.save(tisa.Transformer(config), tmp_path)
    else:
        model = model_of(family.removesuffix(" as decoder"))
        model.config.is_decoder = family == "BERT as decoder"
        tisa.hf.convert(model, positions="keep", init="reference").save_pretrained(tmp_path)
    curves = read_curves(read_checkpoint(tmp_path), reach=30)
    assert curves
    assert {int(c.offsets[-1]) for c in curves} == {0 if causal else 30}


def test_kernels_of_a_decoder_are_fitted_and_drawn_where_its_curve_is(tmp_path):
    model_of("T5").save_pretrained(tmp_path)
    found = analyze(tmp_path)
    decoder, encoder = found.curves
    assert (decoder.curve.label, encoder.curve.label) == ("decoder layer 1", "encoder layer 1")
    assert decoder.fits.offsets.tolist() == list(range(-128, 1))
    assert decoder.fits.kernels[8].offset.max() <= 0
    assert numbers_of(found)["curves"][0]["offsets"] == [-128, 0]
    drawn = {name: figure for name, _, figure in figures_of(found)}
    for number, last in ((1, 0), (2, 64)):
        ax = drawn[f"learned-curve-{number}-kernels"].axes[0]
        assert ax.get_xlim() == (-64, last)
        assert all(max(line.get_xdata()) <= last for line in ax.get_lines())
        assert drawn[f"learned-curve-{number}"].axes[0].get_xlim() == (-128, 2 * last)


def test_heads_of_a_decoder_are_measured_where_they_look(tmp_path):
    model = model_of("GPT-2")
    with torch.no_grad():
        model.wpe.weight.mul_(torch.linspace(-1, 1, 32)[:, None])
    model.save_pretrained(tmp_path)
    found = analyze(tmp_path)
    assert numbers_of(found)["causal"]
    assert found.heads[0].curves.shape == (3, 32)
    assert found.fits.offsets.tolist() == list(range(-31, 1))
    # F̂_P as read, pair by pair: keys up to the query.
    one, part = found.model, found.heads[0]
    logits = (
        found.reading.table @ one.query[0, 1] @ (found.reading.table @ one.key[0, 1]).T / 8**0.5
    )
    rows = [logits[i, : i + 1] for i in range(32)]
    deviation = torch.stack([row.var(correction=0) for row in rows]).mean().sqrt()
    torch.testing.assert_close(part.strength[1], deviation, rtol=1e-4, atol=1e-5)
    means = torch.stack([logits.diagonal(-k).mean() for k in range(31, -1, -1)])
    torch.testing.assert_close(part.curves[1], means, rtol=1e-4, atol=1e-4)
    seen, fitted = torch.cat(rows), torch.cat([means[31 - i :] for i in range(32)])
    r2 = 1 - (seen - fitted).square().sum() / (seen - seen.mean()).square().sum()
    torch.testing.assert_close(part.r2[1], r2, rtol=1e-4, atol=1e-4)
    drawn = {name: figure for name, _, figure in figures_of(found)}
    assert {ax.get_xlim()[1] for ax in drawn["offset-rows"].axes} == {0}
    layers = packed_model(found, numbers_of(found))["sources"][0]["layers"]
    assert layers[0]["first"] == -31
    assert layers[0]["curves"]["columns"] == 32
