"""A saved model computes the same in both ways: by this package, and by its own code alone."""

import importlib.util
import json
import sys

import pytest
import torch
import transformers

import tiny
import tisa.hf
from tiny import inputs, original, shake, token_lists

KINDS = {
    # The case in which remote code generated other tokens than this package, unseen.
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**tiny.decoder(), num_key_value_heads=2, sliding_window=4)
    ),
    **tiny.FAMILIES,
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**tiny.SIZES, global_attn_every_n_layers=1)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**tiny.decoder(), num_key_value_heads=2)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**tiny.decoder(), num_key_value_heads=2, head_dim=8)
    ),
    "camembert": lambda: transformers.CamembertForMaskedLM(
        transformers.CamembertConfig(**tiny.SIZES)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(**tiny.SIZES)
    ),
}
SLIDING = ("mistral",)
DECODERS = (*tiny.DECODERS, "mistral", "qwen2", "qwen3")
ROTARY = (*tiny.ROTARY, "mistral", "qwen2", "qwen3", "modernbert")
# Both run the same operations; only the scores of all layers are computed at once by the package.
EXACT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def remote():
    """Return the copy of the code as transformers imports it: a module that has no package."""
    spec = importlib.util.spec_from_file_location("modeling_tisa", tisa.hf.core.__file__)
    sys.modules["modeling_tisa"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["modeling_tisa"]


def converted(name, positions):
    model = original(name, kinds=KINDS)
    settings = {} if positions == "keep" else {"calibration": token_lists()}
    return shake(tisa.hf.convert(model, positions=positions, init="zero", **settings))


def both(remote, folder, name, dtype=torch.float32):
    """Return the saved model as the package loads it, and as its own code does."""
    head = "CausalLM" if name in DECODERS else "MaskedLM"
    ours = tisa.hf.load(str(folder), dtype=dtype)
    config = remote.TisaConfig.from_pretrained(folder)
    loader = getattr(remote, f"TisaModelFor{head}")
    theirs = loader.from_pretrained(folder, config=config, dtype=dtype)
    assert type(theirs).__module__ == "modeling_tisa"
    assert type(theirs).__name__ == type(ours).__name__
    return ours.eval(), theirs.eval()


def answers(model, name):
    """Return what the model gives in one pass: padded, packed by positions, packed as told."""
    ids = inputs(1, 12, padded=False)["input_ids"]
    first = 2 * any(word in name for word in ("roberta", "camembert", "mpnet"))
    places = first + torch.cat((torch.arange(5), torch.arange(7))).unsqueeze(0)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    real = inputs()["attention_mask"].bool()
    # A list: two generators side by side would leave each other's `no_grad` behind.
    with torch.no_grad():
        found = [model(**inputs()).logits[real]]
        if name != "modernbert":  # It takes no packed batch of this form.
            found.append(model(input_ids=ids, position_ids=places).logits)
            found.append(model(input_ids=ids, position_ids=places, tisa_packed=(ends, 7)).logits)
        if name not in SLIDING:
            found += model(input_ids=ids, output_attentions=True).attentions
    return found


def generated(model, cache, tokens):
    """Return the logits and tokens of a greedy continuation, or the sentence of a refusal."""
    ids = inputs(2, 9, padded=False)["input_ids"]
    settings = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=1)
    if cache == "static":
        settings["past_key_values"] = transformers.StaticCache(model.config, max_cache_len=16)
    elif cache == "none":
        settings["use_cache"] = False
    try:
        made = model.generate(
            ids, **settings, output_logits=True, return_dict_in_generate=True, disable_compile=True
        )
    except ValueError as refused:
        return str(refused)
    return torch.stack(made.logits), made.sequences


def compare(remote, folder, name, dtype, implementations, tokens=6):
    ours, theirs = both(remote, folder, name, dtype)
    off = EXACT[dtype]
    for implementation in implementations:
        # What is the package's alone stands beside what remote code takes by default.
        # (Not "eager": stock code of Llama, OPT and their kin takes its softmax in float32.)
        stock = implementation if implementation in remote.parts.functions else "sdpa"
        stock = "eager" if name == "mpnet" else stock
        ours.set_attn_implementation(implementation)
        theirs.set_attn_implementation(stock)
        near = dict.fromkeys(("rtol", "atol"), off if stock == implementation else 9 * off)
        # Stock Mistral's is NaN there itself: rows that see nothing have float64's lowest number
        # in float32.
        near["equal_nan"] = (name, dtype, stock) == ("mistral", torch.float64, "eager")
        for one, other in zip(answers(ours, name), answers(theirs, name), strict=True):
            torch.testing.assert_close(one, other, **near)
        if name not in DECODERS:
            continue
        first = None
        for cache in ("none", "dynamic", "static"):
            found, expected = (generated(m, cache, tokens) for m in (ours, theirs))
            if isinstance(expected, str):
                assert found == expected
                assert (name, cache) == ("mistral", "static")
                assert "static sliding-window cache" in found
                continue
            torch.testing.assert_close(found[0], expected[0], **near)
            first = found if first is None else first
            if dtype == torch.float32:
                assert torch.equal(found[1], expected[1])
                # A cache changes nothing, a window that slides over it included.
                assert torch.equal(found[1], first[1])


@pytest.mark.parametrize("name", ["mistral", *tiny.FAMILIES])
def test_both_ways_agree(name, remote, tmp_path):
    converted(name, "keep" if name in ROTARY else "replace").save_pretrained(tmp_path)
    few = name in DECODERS and name not in ("mistral", "gpt2")
    names = ("tisa",) if few else tiny.implementations(name)
    compare(remote, tmp_path, name, torch.float32, names, tokens=3)


@pytest.mark.parametrize(
    "name",
    ["mpnet", *(pytest.param(n, marks=pytest.mark.full) for n in ("bert", "roberta", "gpt2"))],
)
def test_both_ways_agree_where_a_part_of_the_positions_stays(name, remote, tmp_path):
    """Vectors at some places; MPNet's own table, for which no scores are asked."""
    settings = {} if name == "mpnet" else {"init": "zero"}
    made = tisa.hf.convert(
        original(name), positions="extend", num_places=5, calibration=token_lists(), **settings
    )
    shake(made).save_pretrained(tmp_path)
    compare(remote, tmp_path, name, torch.float32, tiny.implementations(name), tokens=3)


@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("bert", "ends"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("bert", "global"), ("mpnet", "ends"), ("albert", "ends"))
        ),
        *(pytest.param(name, "ends", marks=pytest.mark.full) for name in ("gpt2", "llama")),
    ],
)
def test_both_ways_agree_with_a_window(name, sinks, remote, tmp_path):
    made = tisa.hf.convert(original(name), positions="keep", init="zero", window=2, sinks=sinks)
    shake(made).save_pretrained(tmp_path)
    compare(remote, tmp_path, name, torch.float32, tiny.implementations(name), tokens=3)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("positions", ["keep", "replace"])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_both_ways_agree_in_everything(name, positions, dtype, remote, tmp_path):
    if positions == "replace" and name in ROTARY:
        pytest.skip("rotations are no table to replace")
    converted(name, positions).save_pretrained(tmp_path)
    compare(remote, tmp_path, name, dtype, tiny.implementations(name))


def test_both_ways_refuse_the_same(remote, tmp_path):
    from safetensors.torch import load_file, save_file

    converted("bert", "replace").save_pretrained(tmp_path)
    for model in both(remote, tmp_path, "bert"):
        for wrong in ("flash_attention_2", "paged|sdpa"):
            with pytest.raises(ValueError, match="would ignore the position scores"):
                model.set_attn_implementation(wrong)
            model.config._attn_implementation = wrong
            with pytest.raises(ValueError, match="would ignore the position scores"):
                model(**inputs())
    with pytest.raises(ValueError, match="sdpa, eager, or install the package tisa"):
        both(remote, tmp_path, "bert")[1].set_attn_implementation("flex_attention")
    weights = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if "offset_scores" not in k}
    save_file(kept, weights, metadata={"format": "pt"})
    (tmp_path / "manifest.json").unlink()  # Its seal would say first that this is damaged.
    config = tmp_path / "config.json"
    for format, words in ((1, "lacks 6 tensors, .*offset_scores"), (99, "upgrade")):
        described = json.loads(config.read_text())
        described["tisa"]["format"] = format
        config.write_text(json.dumps(described))
        with pytest.raises(ValueError, match=words):
            tisa.hf.load(str(tmp_path))
        with pytest.raises(ValueError, match=words):
            remote.TisaModelForMaskedLM.from_pretrained(
                tmp_path, config=remote.TisaConfig.from_pretrained(tmp_path)
            )


def test_the_formula_is_the_packages(remote):
    """What stands twice, tied: f, the order of offsets, and the matrix that is made of them."""
    ours = tisa.TISA(3, 4)
    theirs = remote.Scores(3, {"num_kernels": 4})
    theirs.load_state_dict(ours.state_dict())
    for queries, keys, start in ((1, 1, None), (5, 5, None), (3, 8, None), (2, 9, 4), (7, 4, 0)):
        one, other = (f(queries, keys, query_start=start) for f in (ours, theirs))
        assert torch.equal(one, other)
        dense = ours.matrix(queries, keys, query_start=start)
        assert torch.equal(remote.parts.to_matrix(other, queries, keys), dense)
        offsets = tisa.offsets.offset_range(queries, keys, query_start=start)
        assert torch.equal(remote.offsets(queries, keys, start, None), offsets)
    for module in (ours.half(), theirs.half()):
        assert all(p.dtype == torch.float32 for p in module.parameters())


def test_a_saved_model_carries_the_code_itself(tmp_path):
    converted("bert", "keep").save_pretrained(tmp_path)
    code = (tmp_path / "modeling_tisa.py").read_text()
    with open(tisa.hf.core.__file__, encoding="utf-8") as file:
        assert code == file.read()
