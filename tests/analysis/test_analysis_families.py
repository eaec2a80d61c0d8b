"""Every family, read from disk, against what the model itself computes."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from little_models import config_of, model_of
from tisa.analysis.curves import read_curves
from tisa.analysis.families import has_table, read_positions
from tisa.weights import read_checkpoint

TABLES = [
    "BERT", "RoBERTa", "ALBERT", "ELECTRA", "DistilBERT", "MPNet", "Longformer", "GPT-2", "OPT",
    "OPT, projected", "ViT", "Whisper decoder",
]  # fmt: skip
LEADING = {"RoBERTa": 2, "MPNet": 2, "Longformer": 2, "OPT": 2, "OPT, projected": 2}
# The modules that make queries and keys of the first layer.
MODULES = {
    "GPT-2": ("h.0.attn.c_attn", "h.0.attn.c_attn"),
    "ViT": (r"layers\.0\.attention\.q_proj", r"layers\.0\.attention\.k_proj"),
    "ALBERT": (r".*albert_layers\.0\.attention\.query", r".*albert_layers\.0\.attention\.key"),
    "DistilBERT": (r".*\.0\.attention\.q_lin", r".*\.0\.attention\.k_lin"),
    "MPNet": (r".*\.0\.attention\.attn\.q", r".*\.0\.attention\.attn\.k"),
    "decoder": (r"decoder\.layers\.0\.self_attn\.q_proj", r"decoder\.layers\.0\.self_attn\.k_proj"),
    "self": (r".*\.0\.attention\.self\.query", r".*\.0\.attention\.self\.key"),
}  # fmt: skip


def queries_and_keys(model, family, ids):
    """Return what the first layer's query and key modules put out in a real forward pass."""
    kind = "decoder" if family.startswith(("OPT", "Whisper")) else family
    patterns = MODULES.get(kind, MODULES["self"])
    caught, hooks = {}, []
    for pattern in patterns:
        (module,) = [m for n, m in model.named_modules() if re.fullmatch(pattern, n)]

        def catch(_, __, output, pattern=pattern):
            caught.setdefault(pattern, output.detach().clone())  # Longformer scales it in place

        hooks.append(module.register_forward_hook(catch))
    with torch.no_grad():
        if family == "ViT":
            model(torch.zeros(1, 3, 20, 20))
        elif family == "Whisper decoder":
            model(torch.zeros(1, 8, 32), decoder_input_ids=ids)
        else:
            model(ids)
    for hook in hooks:
        hook.remove()
    query, key = (caught[p] for p in patterns)
    if family == "GPT-2":
        query, key = query.split(24, dim=-1)[0], key.split(24, dim=-1)[1]
    if family == "Longformer":
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    return query.reshape(-1, 24), key.reshape(-1, 24)


@pytest.mark.parametrize("family", TABLES)
def test_queries_and_keys_are_the_models_own(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    found = read_positions(read_checkpoint(tmp_path), biases=True)
    assert found.family == family.split(",")[0]
    assert found.leading_rows == LEADING.get(family, 0)
    ids = torch.tensor([[3, 17, 5, 30, 22, 9, 11, 4]])
    query, key = queries_and_keys(model, family, ids)
    if family == "ViT":
        # An image of zeros: patches are the projection's bias. [CLS] has a vector of its own.
        assert found.grid == (5, 5)
        x = found.positions[1:] + found.constant
        query, key = query[1:], key[1:]
    else:
        x = found.words[ids[0]] + found.positions[: ids.shape[1]] + found.constant
    if found.eps is not None:
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=found.eps)
    x = torch.cat((x, torch.ones(len(x), 1)), 1)
    for maps, expected in ((found.query[0], query), (found.key[0], key)):
        mine = torch.einsum("nw,hwd->nhd", x, maps).flatten(1)
        # Longformer pads the sequence to a multiple of its window.
        torch.testing.assert_close(mine, expected[: len(mine)], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", [f for f in TABLES if f != "OPT, projected"])
@pytest.mark.parametrize("told", [True, False])
def test_epsilon_is_the_models_own(family, told, tmp_path):
    """Some read one name of the config, some another, some none: the model's module tells."""
    import transformers as hf

    config = config_of(family)
    if told:
        config.layer_norm_eps, config.layer_norm_epsilon = 0.25, 0.5
    model = hf.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    if not told:
        plain = json.loads((tmp_path / "config.json").read_text())
        kept = {name: part for name, part in plain.items() if "layer_norm" not in name}
        (tmp_path / "config.json").write_text(json.dumps(kept))
    names = r"embeddings\.LayerNorm|(.*\.)?0\.(ln_1|layernorm_before|self_attn_layer_norm)"
    found = {n: m for n, m in model.named_modules() if re.fullmatch(names, n)}
    (norm,) = [
        m for n, m in found.items() if not n.startswith("encoder.layers")
    ]  # Whisper has both
    assert read_positions(read_checkpoint(tmp_path)).eps == norm.eps


def test_projection_and_normalisation_are_told_apart(tmp_path):
    model_of("ALBERT").save_pretrained(tmp_path)
    found = read_positions(read_checkpoint(tmp_path))
    assert found.projected
    assert found.positions.shape == (32, 8)
    assert found.query.shape == (1, 3, 9, 8)  # one layer, shared by all passes
    assert found.through.shape == (9, 24)
    weights = read_checkpoint(tmp_path).tensors
    mapping = weights["encoder.embedding_hidden_mapping_in.weight"]
    query = weights["encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight"]
    raw = (mapping.T @ query.T).reshape(8, 3, 8).transpose(0, 1)
    torch.testing.assert_close(found.raw_query, raw)


def test_biases_of_queries_and_keys_are_an_option(tmp_path):
    model_of("BERT").save_pretrained(tmp_path)
    plain, biased = (read_positions(read_checkpoint(tmp_path), biases=b) for b in (False, True))
    torch.testing.assert_close(plain.query[:, :, :-1], biased.query[:, :, :-1])
    bias = read_checkpoint(tmp_path).tensors["encoder.layer.1.attention.self.query.bias"]
    difference = (biased.query - plain.query)[1, :, -1].reshape(-1)
    torch.testing.assert_close(difference, bias)


@pytest.mark.parametrize("family", ["BERT", "ALBERT", "RoBERTa", "GPT-2", "OPT", "MPNet"])
def test_a_config_without_model_type_is_enough(family, tmp_path):
    """As in old checkpoints: the names of the tensors tell."""
    import json

    import transformers as hf

    torch.manual_seed(0)
    config = config_of(family)
    decoders = ("GPT-2", "OPT")
    kind = hf.AutoModelForCausalLM if family in decoders else hf.AutoModelForMaskedLM
    model = kind.from_config(config)
    model.save_pretrained(tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    del plain["model_type"], plain["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert read_positions(read_checkpoint(tmp_path)).family == family


def test_t5_tables_are_the_models_own_bias(tmp_path):
    from transformers.models.t5.modeling_t5 import T5Attention

    model = model_of("T5")
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert not has_table(checkpoint)
    curves = {c.label: c for c in read_curves(checkpoint, reach=100)}
    assert set(curves) == {"encoder layer 1", "decoder layer 1"}
    with torch.no_grad():
        for side in ("encoder", "decoder"):
            attention = getattr(model, side).block[0].layer[0].SelfAttention
            assert isinstance(attention, T5Attention)
            bias = attention.compute_bias(101, 101)[0]
            found = curves[f"{side} layer 1"]
            # Offsets 0 … 100 along the first row, −100 … 0 up the first column.
            expected = torch.cat((bias[:, :, 0].flip(1), bias[:, 0, 1:]), 1)
            # The decoder's future is masked: its curve ends at 0.
            last = 0 if side == "decoder" else 100
            assert found.offsets.tolist() == list(range(-100, last + 1))
            torch.testing.assert_close(found.scores, expected[:, : 101 + last])


def test_mpnets_relative_table_is_read_beside_its_positions(tmp_path):
    model = model_of("MPNet")
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert has_table(checkpoint)
    (curve,) = read_curves(checkpoint, reach=20)
    with torch.no_grad():
        bias = model.encoder.compute_position_bias(torch.zeros(1, 21, 24))[0]
        expected = torch.cat((bias[:, :, 0].flip(1), bias[:, 0, 1:]), 1)
    torch.testing.assert_close(curve.scores, expected)


def test_kernels_of_converted_models_are_read_as_they_are(tmp_path):
    import safetensors.torch

    import tisa

    scoring = tisa.TISA(4, 3)
    near_far = tisa.NearFar(4, 2)
    tensors = {f"encoder.layer.{n}.attention.self.offset_scores.0.{k}": v.clone()
               for n in (0, 10, 2) for k, v in scoring.state_dict().items()}  # fmt: skip
    tensors |= {f"extra.{k}": v for k, v in near_far.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    curves = read_curves(read_checkpoint(tmp_path / "model.safetensors"), reach=30)
    assert [c.label for c in curves] == ["layer 1", "layer 3", "layer 11", "extra"]
    with torch.no_grad():
        torch.testing.assert_close(curves[1].scores, scoring(31))
        torch.testing.assert_close(curves[3].scores, near_far(31))
    torch.testing.assert_close(curves[0].center, scoring.kernel_offsets.detach())
    assert curves[3].amplitude is None


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles_and_shards_hold_the_same(tmp_path, sharded):
    model = model_of("BERT")
    model.save_pretrained(tmp_path / "one")
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    if sharded:
        model.save_pretrained(tmp_path / "bin", max_shard_size="20KB")
        assert (tmp_path / "bin" / "model.safetensors.index.json").is_file()
    else:
        # As torch wrote files before 1.6.
        torch.save(
            state, tmp_path / "bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False
        )
    one, other = (read_positions(read_checkpoint(tmp_path / n)) for n in ("one", "bin"))
    torch.testing.assert_close(one.positions, other.positions, rtol=0, atol=0)
    torch.testing.assert_close(one.query, other.query, rtol=0, atol=0)


def saved(family, folder, change, **config):
    """Save a little model with other tensors or another config, and return what is read of it."""
    model_of(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    return read_checkpoint(folder)


def test_quantised_weights_are_no_numbers(tmp_path):
    name = "encoder.layer.0.attention.self.query.weight"

    def quantise(tensors):
        tensors[name] = (tensors[name] * 100).to(torch.int8)

    with pytest.raises(ValueError, match="quantised weights; analyse the model"):
        read_positions(saved("BERT", tmp_path, quantise))


def test_a_table_that_the_model_does_not_use(tmp_path):
    found = saved("BERT", tmp_path, lambda tensors: None, position_embedding_type="relative_key")
    assert not has_table(found)
    with pytest.raises(ValueError, match="does not use its position table: it has relative_key"):
        read_positions(found)


def test_tables_of_cross_attention_are_left_out(tmp_path):
    def add(tensors):
        of_decoder = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[of_decoder.replace("layer.0.SelfAttention", "layer.1.EncDecAttention")] = tensors[
            of_decoder
        ].clone()

    assert len(read_curves(saved("T5", tmp_path, add))) == 2


def test_tensorflows_names_of_layer_norm_are_read(tmp_path):
    model_of("BERT").save_pretrained(tmp_path)
    whole = read_positions(read_checkpoint(tmp_path))
    tensors = {
        n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v
        for n, v in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in tensors)
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "old")
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    found = read_positions(read_checkpoint(tmp_path / "old"))
    assert found.eps == whole.eps is not None
    torch.testing.assert_close(found.query, whole.query)


@pytest.mark.parametrize(
    "end",
    ["LayerNorm.weight", "word_embeddings.weight", "token_type_embeddings.weight",
     "0.attention.self.key.bias", "1.attention.self.query.weight"],
)  # fmt: skip
def test_what_is_missing_is_not_left_out(tmp_path, end):
    model_of("BERT").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (name,) = [n for n in tensors if n.endswith(end) and "output" not in n]
    save_file({n: v for n, v in tensors.items() if n != name}, path)
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*is missing"):
        read_positions(read_checkpoint(tmp_path))
