"""Attention that transformers has not: its scores are declared, proved, and then fused."""

import math

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tisa
from fused_kinds import assert_close
from tisa.hf.fused.models import fused_modules
from tisa.offsets import offset_range, to_matrix

HEADS, DIM, WIDTH = 6, 8, 48


class Config(PretrainedConfig):
    model_type = "somebodys"


class Jinas(nn.Module):
    """Of Jina's form: BERT's names, a dense bias handed in, perhaps norms of queries and keys."""

    def __init__(self, normed=False, scale=1.0):
        super().__init__()
        self.num_attention_heads, self.scale = HEADS, scale
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(WIDTH) if normed else None

    def project(self, hidden_states):
        norm = self.norm or (lambda x: x)
        made = norm(self.query(hidden_states)), norm(self.key(hidden_states))
        made = (*made, self.value(hidden_states))
        return tuple(x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in made)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False, bias=None):
        query, key, value = self.project(hidden_states)
        logits = self.scale * query @ key.mT / math.sqrt(DIM) + bias
        if attention_mask is not None:
            logits = logits + attention_mask
        weights = self.dropout(logits.softmax(-1))
        out = (weights @ value).transpose(1, 2).flatten(-2)
        return (out, weights) if output_attentions else (out,)


class Interfaces(nn.Module):
    """Calls transformers' interface, as code of today does, with a dense bias that is declared."""

    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config, self.scaling = config, DIM**-0.5
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden_states, attention_mask=None, bias=None, **kwargs):
        shape = (*hidden_states.shape[:-1], HEADS, DIM)
        query, key, value = (
            linear(hidden_states).view(shape).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            position_bias=bias,
            **kwargs,
        )
        return out.flatten(-2), weights


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling=1.0, position_bias=None, **kwargs
):
    logits = query @ key.mT * scaling
    logits = logits if position_bias is None else logits + position_bias
    logits = logits if attention_mask is None else logits + attention_mask
    weights = logits.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class Model(PreTrainedModel):
    config_class = Config
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        form = {
            "interface": lambda: Interfaces(config), "bert": Jinas,
            "normed": lambda: Jinas(normed=True),
        }[config.form]  # fmt: skip
        self.embed = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList(form() for _ in range(2))
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids)
        length = input_ids.shape[1]
        bias = to_matrix(tisa.ALiBi(HEADS)(length, length), length, length).to(x)[None]
        if attention_mask is not None:
            low = torch.finfo(x.dtype).min
            attention_mask = (1 - attention_mask[:, None, None, :].to(x)) * low
        for layer in self.layers:
            x = x + layer(x, attention_mask, bias=bias, **kwargs)[0]
        return x


def somebodys(form, dtype=torch.float64):
    torch.manual_seed(0)
    model = Model(Config(form=form)).to(dtype)
    model.config._attn_implementation = "eager"
    with torch.no_grad():  # what is in a query matters
        for name, p in model.named_parameters():
            p.mul_(20.0 if "query" in name or "key" in name else 5.0 if p.ndim == 2 else 1.0)
    return model.eval()


def told(model, scoring=None, **options):
    for layer in model.layers:
        tisa.hf.offset_scores(layer, scoring or tisa.ALiBi(HEADS), **options)
    return model


def given(padding=True):
    ids = torch.randint(0, 30, (3, 75), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, :9] = 0
        mask[2, -30:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model):
    batch = given()
    out = model(**batch) * batch["attention_mask"][..., None]
    model.zero_grad(set_to_none=True)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters()}


OPTIONS = {
    "bert": {},
    "interface": {},
    "normed": {"project": lambda module, hidden_states: module.project(hidden_states)},
}


@pytest.mark.parametrize("form", OPTIONS)
def test_outputs_and_gradients_are_those_of_their_own_code(form):
    model, fused = somebodys(form), tisa.hf.fuse(told(somebodys(form), **OPTIONS[form]))
    assert len(fused_modules(fused)) == 2
    theirs, ours = gradients(model), gradients(fused)
    assert_close(ours[0], theirs[0])
    for name, gradient in theirs[1].items():
        assert_close(ours[1][name], gradient, name)


@pytest.mark.parametrize("form", OPTIONS)
def test_files_and_the_way_back(form, tmp_path):
    model, fused = somebodys(form), tisa.hf.fuse(told(somebodys(form), **OPTIONS[form]))
    fused(**given())
    fused.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, attn_implementation="eager").double().eval()
    assert not fused_modules(loaded)
    expected = model(**given())
    assert torch.equal(loaded(**given()), expected)
    names = [sorted(vars(layer)) for layer in told(somebodys(form), **OPTIONS[form]).layers]
    assert tisa.hf.unfuse(fused) is fused
    assert torch.equal(fused(**given()), expected)
    assert [sorted(vars(layer)) for layer in fused.layers] == names
    # What was declared stays declared.
    assert fused_modules(tisa.hf.fuse(fused))


@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.02])
def test_other_scores_than_its_own_are_found_out(form, factor):
    def wrong(queries, keys, query_start=None):
        return factor * tisa.ALiBi(HEADS)(queries, keys, query_start=query_start)

    fused = tisa.hf.fuse(told(somebodys(form), wrong, **OPTIONS[form]))
    with pytest.raises(ValueError, match="declared"):
        fused(**given())


@pytest.mark.parametrize("form", ["bert", "normed"])
def test_what_stands_between_projections_and_softmax_is_found_out(form):
    model = somebodys(form)
    for layer in model.layers:
        layer.scale = 1.1
    fused = tisa.hf.fuse(told(model))
    with pytest.raises(ValueError, match="`project` can do it"):
        fused(**given())


def test_weights_on_request_are_its_own():
    model, fused = somebodys("bert"), tisa.hf.fuse(told(somebodys("bert")))
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    bias = to_matrix(tisa.ALiBi(HEADS)(20, 20), 20, 20)[None].double()
    ours = fused.layers[0](x, output_attentions=True, bias=bias)
    theirs = model.layers[0](x, output_attentions=True, bias=bias)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_the_modules_own_parameters_are_trained():
    model = somebodys("bert")
    for layer in model.layers:
        layer.slopes = nn.Parameter(tisa.ALiBi(HEADS)(1, 2)[:, 0].neg().double())

        def scoring(queries, keys, query_start=None, layer=layer):
            offsets = offset_range(queries, keys, query_start=query_start)
            return -layer.slopes.abs()[:, None] * offsets.abs()

        tisa.hf.offset_scores(layer, scoring)
    fused = tisa.hf.fuse(model)
    _, found = gradients(fused)
    assert all(found[f"layers.{i}.slopes"].abs().max() > 0 for i in range(2))


@pytest.mark.unchecked
@pytest.mark.parametrize("form", OPTIONS)
def test_compiles_after_the_proof(form):
    fused = tisa.hf.fuse(told(somebodys(form), **OPTIONS[form]))
    expected = fused(**given())
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**given()), expected)


@pytest.mark.unchecked
def test_what_cannot_be_declared():
    model = somebodys("bert")
    layer = model.layers[0]
    with pytest.raises(TypeError, match="attention module"):
        tisa.hf.offset_scores("layer", tisa.ALiBi(HEADS))
    with pytest.raises(TypeError, match="must be a scoring function"):
        tisa.hf.offset_scores(layer, "alibi")
    with pytest.raises(ValueError, match="parameters of its own"):
        tisa.hf.offset_scores(layer, tisa.TISA(HEADS))
    with pytest.raises(ValueError, match="say with `project`"):
        tisa.hf.offset_scores(nn.Linear(3, 3), tisa.ALiBi(HEADS))
    fused = tisa.hf.fuse(told(model))
    with pytest.raises(ValueError, match="unfuse it first"):
        tisa.hf.offset_scores(fused.layers[0], tisa.ALiBi(HEADS))
    wrong_heads = tisa.hf.fuse(told(somebodys("bert"), tisa.ALiBi(4)))
    with pytest.raises(ValueError, match="must return"):
        wrong_heads(**given())
    dense = torch.zeros(3, 1, 75, 75, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected \(batch, 1, 1, keys\)"):
        fused.layers[0](torch.randn(3, 75, WIDTH, dtype=torch.float64), dense)
