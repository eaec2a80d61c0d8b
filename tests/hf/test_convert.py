"""Conversion itself: fit, fold, what is refused, and that originals are left alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

import tiny
import tisa.hf
from tiny import inputs, logits, original, shake, token_lists
from tisa.hf.calibration import ends_of, fold_vectors, tokens_of
from tisa.hf.core import Call, Folded
from tisa.hf.fit import attention_weights
from tisa.hf.implementations import Together, band

TOKENS = token_lists(24)


def attended(name="bert"):
    """Return a tiny model whose heads look at their neighbours, by its position table."""
    model = original(name)
    table = tisa.hf.families.position_table(model).embedding
    place = torch.arange(table.num_embeddings).float().unsqueeze(1)
    waves = place / 4 ** torch.linspace(0, 3, table.embedding_dim // 2)
    with torch.no_grad():
        table.weight.copy_(torch.cat((waves.sin(), waves.cos()), 1))
    return model


@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("albert", "mpnet"))],
)
def test_fitted_attention_is_nearer_to_the_original(name):
    model = attended(name)
    settings = dict(positions="replace", calibration=TOKENS)
    folded = tisa.hf.convert(model, init="zero", **settings)
    fitted = tisa.hf.convert(model, init="fit", num_kernels=3, **settings)
    batches = tisa.hf.calibration.batches_of([tisa.hf.calibration.Tokens(x) for x in TOKENS], model)
    distances = []
    for converted in (folded, fitted):
        converted.set_attn_implementation("eager")
        model.set_attn_implementation("eager")
        with torch.no_grad():
            ours, theirs = (attention_weights(m, batches) for m in (converted, model))
        distances.append(
            sum((a - b).abs().sum() for x, y in zip(ours, theirs, strict=True)
                for a, b in zip(x, y, strict=True))
        )  # fmt: skip
    assert distances[1] < 0.97 * distances[0], distances


def test_a_fit_finds_the_scores_that_made_the_attention():
    """Positions that are themselves kernels: taken out and fitted, the model is the same."""
    model = original("bert")
    with torch.no_grad():
        tisa.hf.families.position_table(model).embedding.weight.zero_()
    truth = shake(tisa.hf.convert(model, positions="keep", init="zero", num_kernels=1), 2.0)
    truth.set_attn_implementation("eager")
    blank = tisa.hf.convert(model, positions="replace", init="zero", fold=False, num_kernels=1)
    batches = tisa.hf.calibration.batches_of([tisa.hf.calibration.Tokens(x) for x in TOKENS], model)
    left = tisa.hf.fit.fit_scores(blank, truth, batches)
    assert max(float(x.max()) for x in left) < 1e-3
    torch.testing.assert_close(
        logits(blank, **inputs()), logits(truth, **inputs()), rtol=0.05, atol=0.05
    )


HEADS = {
    "a dip near the query": lambda k: -6.0 * torch.exp(-0.02 * k**2) - 3.0,
    "a spike before the query": lambda k: 7.0 * (k == -1) + 2.0,
    "a slope": lambda k: -0.1 * k.abs(),
    "ends of different height": lambda k: torch.tanh(k / 6),
}


def aim_of(curves, length):
    """Return the aim of heads that have these curves, on random content."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(length)
    logits = torch.randn(24, len(curves), length, length, generator=generator)
    k = (rows - rows[:, None]).float()
    target = (logits + torch.stack([f(k) for f in curves])).softmax(-1)
    batch = tisa.hf.calibration.Batch({}, rows, torch.ones(24, length, dtype=torch.bool))
    return tisa.hf.fit.Aim([logits], [target], [batch])


def test_a_fitted_curve_stays_at_its_level_beyond_the_offsets_seen():
    """Kernels are 0 far away, and a softmax does not see where a curve stands as a whole."""
    length = 32
    aim = aim_of(HEADS.values(), length)
    scoring = tisa.TISA(len(HEADS), 5, init="zero")
    with torch.no_grad():
        left = tisa.hf.fit.fit_kernels_to(scoring, aim)
        assert left.max() < 2e-3, dict(zip(HEADS, left.tolist(), strict=True))
        for side in (-1, 1):
            edge = scoring.scores(side * torch.arange(length - 8, length)).mean(1, keepdim=True)
            beyond = scoring.scores(side * torch.arange(length, 3 * length))
            moved = (beyond - edge).abs().amax(1)
            assert moved.max() < 1.0, dict(zip(HEADS, moved.tolist(), strict=True))
        for far in (10**4, -(10**4)):
            # Ends of different height cannot both be at 0, where every kernel goes in the end.
            assert (scoring.scores(torch.tensor([far])) == 0).all()
        level = scoring.scores(torch.arange(length - 8, length)).mean(1)
        assert level.abs().max() < 1.5


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_model_in_float16_is_fitted_to_what_is_there(name):
    """Padding and keys to come are hidden by −65,504 there; they count as little as in float32."""
    half = original(name).half()
    whole = copy.deepcopy(half).float()
    curves = []
    for model in (half, whole):
        fitted = tisa.hf.convert(model, positions="replace", init="fit", calibration=TOKENS)
        scoring = [m for m in fitted.modules() if isinstance(m, tisa.TISA)]
        offsets = torch.arange(-8, 1 if name == "gpt2" else 9)
        curves.append(torch.stack([m.scores(offsets) for m in scoring]).detach())
    centred = [curve - curve.mean(-1, keepdim=True) for curve in curves]
    torch.testing.assert_close(centred[0], centred[1], rtol=0, atol=0.1 * centred[1].abs().max())


def test_frozen_weights_stay_frozen():
    model = original("bert").requires_grad_(False)
    model.cls.predictions.bias.requires_grad_(True)
    converted = tisa.hf.convert(model, positions="keep", init="zero")
    trained = {n for n, p in converted.named_parameters() if p.requires_grad}
    scores = {n for n, _ in converted.named_parameters() if "offset_scores" in n}
    assert trained == scores | {"cls.predictions.bias"}


def test_tokens_inside_a_text_have_others_on_both_sides():
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    wanted = [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert tisa.hf.calibration.inner(real).int().tolist() == wanted


def padded(side):
    """Return TOKENS as rows of one length, and their masks."""
    length = max(len(x) for x in TOKENS)
    ids, masks = [], []
    for x in TOKENS:
        pad, ones = [1] * (length - len(x)), [1] * len(x)
        zeros = [0] * len(pad)
        ids.append([*x, *pad] if side == "right" else [*pad, *x])
        masks.append([*ones, *zeros] if side == "right" else [*zeros, *ones])
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_no_text_to_calibrate_on(side):
    model = original("bert")
    ids, masks = padded(side)
    rows = [
        {"input_ids": i, "attention_mask": m, "token_type_ids": torch.arange(len(i))}
        for i, m in zip(ids, masks, strict=True)
    ]
    # A token that the mask hides is hidden whatever it is.
    other = [{**row, "input_ids": row["input_ids"].masked_fill(row["attention_mask"] == 0, 9)}
             for row in rows]  # fmt: skip
    for given in (ids, ids.tolist(), rows, other, [{"input_ids": i} for i in ids]):
        assert [x.ids for x in tokens_of(given, model)] == TOKENS
    for found, mask in zip(tokens_of(other, model), masks, strict=True):
        assert found.types == mask.nonzero().squeeze(1).tolist()
    settings = dict(positions="replace", init="zero")
    wanted, made = (tisa.hf.convert(model, calibration=c, **settings) for c in (TOKENS, ids))
    assert made.config.tisa["last_token_id"] == 3
    assert torch.equal(made.get_input_embeddings().fold, wanted.get_input_embeddings().fold)


def test_padding_that_may_be_an_end_is_left_once():
    model = original("gpt2")
    model.config.pad_token_id = 3  # Its last token.
    rows = [[2, 7, 8, 3, 3, 3], [2, 7, 8, 9, 7, 3], [2, 7, 8, 9, 7, 6], [3, 3, 7, 8, 9, 7]]
    wanted = [rows[0][:4], rows[1], rows[2], rows[3][2:]]
    assert [x.ids for x in tokens_of(rows, model)] == wanted


def test_token_types_end_where_the_tokens_do():
    ids = [2, *(4 + i % 50 for i in range(90)), 3]
    pair = {"input_ids": ids, "token_type_ids": [0] * 40 + [1] * 52}
    model = original("bert")
    (found,) = tokens_of([pair], model)
    assert len(found.ids) == 64
    assert found.types == [0] * 40 + [1] * 24
    converted = tisa.hf.convert(model, positions="replace", init="fit", calibration=[pair, pair])
    assert torch.isfinite(logits(converted, **inputs())).all()


def test_the_fold_is_the_mean_over_the_places_where_tokens_stand():
    sequences = [tisa.hf.calibration.Tokens(x) for x in ([2, 9, 8, 3], [2, 7, 3], [2, 5, 6, 4, 3])]
    ends = ends_of(sequences)
    assert ends == (2, 3)
    table = torch.randn(10, 4)
    any_, last, first = fold_vectors(table, sequences, ends)
    torch.testing.assert_close(first, table[0])
    torch.testing.assert_close(last, table[[3, 2, 4]].mean(0))
    torch.testing.assert_close(any_, table[[1, 2, 1, 1, 2, 3]].mean(0))
    alike = fold_vectors(table, sequences, ends, by="inputs")
    means = [table[1:3].mean(0), table[1], table[1:4].mean(0)]
    torch.testing.assert_close(alike[0], torch.stack(means).mean(0))
    torch.testing.assert_close(alike[1:], torch.stack((last, first)))
    assert ends_of([tisa.hf.calibration.Tokens(x) for x in ([2, 9, 3], [4, 9, 3])]) == (-1, 3)
    # Empty texts: nothing but ends.
    bare = [tisa.hf.calibration.Tokens([2, 3])] * 2
    any_, last, first = fold_vectors(table, bare, ends_of(bare))
    torch.testing.assert_close(torch.stack((any_, last, first)),
                               torch.stack((table[:2].mean(0), table[1], table[0])))  # fmt: skip


def test_folded_vectors_stay_out_of_tied_output_embeddings():
    model = original("bert")
    converted = tisa.hf.convert(model, positions="replace", init="zero", calibration=TOKENS)
    words = converted.get_input_embeddings()
    assert isinstance(words, Folded)
    assert torch.equal(words.weight, model.get_input_embeddings().weight)
    assert converted.get_output_embeddings().weight is words.weight
    assert (words.fold != 0).any()
    rows = tisa.hf.families.position_table(original("roberta"))
    assert rows.first_row == 2
    folded = tisa.hf.convert(
        original("roberta"), positions="replace", init="zero", calibration=TOKENS
    ).get_input_embeddings()
    torch.testing.assert_close(folded.fold[2], rows.embedding.weight[2])
    converted.resize_token_embeddings(70)
    assert isinstance(converted.get_input_embeddings(), Folded)
    assert torch.isfinite(logits(converted, **inputs())).all()


def test_a_model_without_its_pooling_layer_stays_without(tmp_path):
    config = transformers.BertConfig(**tiny.SIZES)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    converted = tisa.hf.convert(model, positions="keep", init="zero")
    assert converted.pooler is None
    with torch.no_grad():
        found, expected = (m(**inputs())[0] for m in (converted, model))
    torch.testing.assert_close(found, expected)
    converted.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    with torch.no_grad():
        assert torch.equal(again.eval()(**inputs())[0], found)


def test_one_or_many_scores_for_albert():
    model = original("albert")
    shared, each = (
        tisa.hf.convert(model, positions="keep", num_kernels=2, shared=s) for s in (True, False)
    )

    def count(m):
        return sum(p.numel() for n, p in m.named_parameters() if "offset_scores" in n)

    assert count(shared) == 3 * 2 * 4
    assert count(each) == 3 * 3 * 2 * 4
    calls = []
    scoring = next(m for m in shared.modules() if isinstance(m, tisa.TISA))
    scoring.register_forward_hook(lambda module, args, output: calls.append(output.shape[-1]))
    for implementation in tiny.IMPLEMENTATIONS:
        shared.set_attn_implementation(implementation)
        for length in (11, 9):
            logits(shared, **inputs(length=length))
        assert calls == [21, 17], "the shared vector is computed once for a pass and its length"
        calls.clear()
    with pytest.raises(ValueError, match="ALBERT"):
        tisa.hf.convert(original("bert"), positions="keep", shared=True)


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama"])
def test_the_scores_of_all_layers_are_computed_at_once(name, monkeypatch):
    monkeypatch.setattr(tisa.hf.implementations, "LAUNCHES", ("cpu",))
    model = shake(
        tisa.hf.convert(original(name), positions="keep", init="reference", num_kernels=2)
    )
    calls = []
    scores = tisa.TISA.scores
    monkeypatch.setattr(tisa.TISA, "scores", lambda *given: calls.append(1) or scores(*given))

    def gradients():
        calls.clear()
        model.zero_grad()
        found = model(**inputs()).logits
        found.square().mean().backward()
        return found, [p.grad.clone() for n, p in model.named_parameters() if "kernel" in n]

    together, first = gradients()
    assert len(calls) == 1
    again, second = gradients()
    assert torch.equal(together, again)
    monkeypatch.setattr(tisa.hf.implementations, "LAUNCHES", ())
    apart, third = gradients()
    assert len(calls) == model.config.num_hidden_layers
    torch.testing.assert_close(together, apart)
    for one, other, alone in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-6)
    monkeypatch.undo()
    if model.supports_gradient_checkpointing:
        tiny.checkpoint_activations(model.train())
        model(**inputs()).logits.square().mean().backward()


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["bert", "albert"])
def test_bands_are_worked_out_once_for_all_layers_and_anew_in_every_pass(name, monkeypatch):
    model = shake(
        tisa.hf.convert(original(name), positions="keep", init="reference", num_kernels=2)
    )
    owners = [m for m in model.modules() if isinstance(m, tisa.hf.core.OwnScores)]
    passes = [(owner, number) for owner in owners for number in range(len(owner.offset_scores))]
    scorings = [owner.offset_scores[number] for owner, number in passes]
    assert len(scorings) > 1
    worked_out = []
    support = tisa.TISA.support
    monkeypatch.setattr(
        tisa.TISA, "support", lambda *given: worked_out.append(1) or support(*given)
    )
    # Bands are for GPUs; this is all that is asked of the query.
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)

    def bands(**options):
        worked_out.clear()
        together = Together(owners, **options)
        calls = [(owner, Call(pass_index=n, together=together)) for owner, n in passes]
        return [band(owner, query, 512, call) for owner, call in calls]

    found = bands()
    assert len(worked_out) == 1
    # A fused optimiser leaves no trace on what it changes: not even its version.
    optimizer = torch.optim.AdamW([s.kernel_offsets for s in scorings], lr=10.0, fused=True)
    for scoring in scorings:
        scoring.kernel_offsets.grad = torch.ones_like(scoring.kernel_offsets)
    optimizer.step()
    moved = bands(with_vectors=False)
    assert len(worked_out) == 1
    for before, after, scoring in zip(found, moved, scorings, strict=True):
        assert not torch.equal(after, before)
        assert torch.equal(after, scoring.band(torch.bfloat16))
    assert torch.equal(band(owners[0], query, 512, Call()), moved[0])


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": "both"}, "positions"),
        ({"init": "random"}, "init"),
        ({"num_kernels": -1}, "num_kernels"),
        ({"num_kernels": 2.5}, "num_kernels"),
        ({"fold_by": "words"}, "fold_by"),
        ({"calibration": [[2, -4, 5, 3]]}, "another model"),
        ({"calibration": [None]}, "NoneType"),
        ({"init": "fit", "positions": "keep"}, "keep"),
        ({"calibration": []}, "empty"),
        ({"calibration": [[2, 3]]}, "no order"),
        ({"calibration": [[2, 3, 4, 5], [1, 1, 1, 1]]}, "empty text"),
        ({"calibration": [{"input_ids": [2, 5, 3], "attention_mask": [1, 1]}]}, "each of 3 tokens"),
        ({"calibration": [[2, 900, 3, 4]]}, "another model"),
        ({"calibration": ["a text"]}, "tokenizer"),
        ({"calibration": "a text"}, "list"),
        ({"calibration": None}, "tokenizer"),
        ({"calibration": [[2, 5.5, 3]]}, "token ids"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_changed(change, words):
    model = original("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    settings = {"positions": "replace", "init": "fit", "calibration": TOKENS, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        tisa.hf.convert(model, **settings)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(model) is transformers.BertForMaskedLM


@pytest.mark.unchecked
def test_text_that_the_tokenizer_does_not_know_is_refused():
    class Foreign:
        unk_token_id, all_special_ids = 5, (2, 3)

        def __call__(self, text, **_):
            return {"input_ids": [2, *[5] * len(text.split()), 3]}

    with pytest.raises(ValueError, match="another language"):
        tokens_of(["one two three"], original("bert"), Foreign())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: transformers.ViTModel(transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40,
            image_size=32, patch_size=16)), "two-dimensional"),
        (lambda: transformers.T5Model(transformers.T5Config(
            vocab_size=60, d_model=32, num_layers=1, num_heads=4, d_ff=40, d_kv=8)), "encoder"),
        (lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=40)), "attention interface"),
        (lambda: transformers.T5EncoderModel(transformers.T5Config(
            vocab_size=60, d_model=32, num_layers=1, num_heads=4, d_ff=40, d_kv=8)),
         "relative table"),
        (lambda: torch.nn.Linear(2, 2), "no transformers model"),
        (lambda: transformers.GPT2Model(transformers.GPT2Config(
            vocab_size=60, n_embd=32, n_layer=1, n_head=4, reorder_and_upcast_attn=True)),
         "reorder"),
        (lambda: tisa.hf.convert(original("bert"), positions="keep"), "already"),
    ],
)  # fmt: skip
@pytest.mark.unchecked
def test_models_that_cannot_be_converted_say_why(build, words):
    with pytest.raises(ValueError, match=words):
        tisa.hf.convert(build(), positions="keep")


def test_position_bias_of_the_interface_is_ignored_by_eager_bert():
    """The trap that the attention modules' own scores avoid: stock eager code swallows a bias."""
    model = original("bert")
    model.set_attn_implementation("eager")
    bias = torch.randn(1, 4, 11, 11)
    with torch.no_grad():
        assert torch.equal(model(**inputs()).logits, model(**inputs(), position_bias=bias).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "tisa"])
def test_an_input_that_is_all_padding_is_no_nan(implementation):
    model = shake(tisa.hf.convert(original("bert"), positions="keep", init="zero"))
    model.set_attn_implementation(implementation)
    given = inputs()
    given["attention_mask"][1] = 0
    found = logits(model, **given)
    assert torch.isfinite(found).all()
    given["input_ids"][1] = 7
    real = given["attention_mask"].bool()
    torch.testing.assert_close(logits(model, **given)[real], found[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fold_has_the_gradient_of_a_sum(dtype):
    """In bfloat16 too: added up one by one, thousands of tokens would leave it far from its sum."""
    torch.manual_seed(0)
    made = tisa.hf.convert(original("bert"), init="zero", calibration=TOKENS).to(dtype)
    words = made.get_input_embeddings()
    ids = torch.randint(4, 60, (4, 1500))
    ids[:, 0], ids[:, -1], ids[0, 7], ids[1, 9] = 2, 3, 3, 2
    upstream = torch.rand(4, 1500, words.embedding_dim).to(dtype)
    kinds = torch.where(ids == 2, 2, torch.where(ids == 3, 1, 0))
    found = words(ids)
    plain = torch.nn.functional.embedding(ids, words.weight)
    assert torch.equal(found, plain + words.fold[kinds])
    (gradient,) = torch.autograd.grad(found, words.fold, upstream, retain_graph=True)
    exact = torch.stack([upstream[kinds == kind].double().sum(0) for kind in range(3)])
    torch.testing.assert_close(gradient.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(torch.autograd.grad(found, words.fold, upstream)[0], gradient)
