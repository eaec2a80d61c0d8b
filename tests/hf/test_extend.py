"""`positions="extend"`: vectors at some places of the table, lines between them, beside scores."""

import copy

import pytest
import torch

import tiny
import tisa.hf
from tiny import inputs, logits, original, shake, token_lists
from tisa.hf.core import Places
from tisa.hf.export import export_onnx, export_program
from tisa.hf.places import knots_of, most_places, place_vectors

TOKENS = token_lists(24)
TABLES = ("bert", "roberta", "electra", "distilbert", "albert", "mpnet", "gpt2")
QUICK = ("bert", "mpnet")
EVERY_TABLE = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in TABLES]
)
BARE = dict(positions="extend", num_kernels=0, calibration=TOKENS)


def by_hand(places, knots, vectors):
    """Return the vector of each place, found between its two neighbours one by one, in float64."""
    found = []
    for place in places:
        if place <= knots[0] or place >= knots[-1]:
            found.append(vectors[0 if place <= knots[0] else -1])
            continue
        right = next(i for i, knot in enumerate(knots) if knot > place)
        left, gap = right - 1, knots[right] - knots[right - 1]
        share = (place - knots[left]) / gap
        found.append((1 - share) * vectors[left] + share * vectors[right])
    return torch.stack(found)


@pytest.mark.parametrize("knots", [[0, 1, 4, 9, 20], [2, 3, 7], [5], [0, 63]])
def test_places_are_lines_between_vectors(knots):
    generator = torch.Generator().manual_seed(0)
    module = Places(knots, 3, torch.float64)
    with torch.no_grad():
        module.places.copy_(torch.randn(len(knots), 3, generator=generator))
    at = torch.tensor([[0, 1, 2, 3, 5, 8], [9, 19, 20, 21, 64, 10**6]])
    vectors = module.places.detach().clone().requires_grad_()
    expected = by_hand(at.flatten().tolist(), knots, vectors).view(2, 6, 3)
    torch.testing.assert_close(module(at), expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((out * upstream).sum(), by)[0]
        for out, by in ((module(at), module.places), (expected, vectors))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("positions", "count"), [(512, 48), (64, 6), (30, 3), (64, 64), (9, 2)])
def test_the_vectors_are_those_of_least_squares(positions, count):
    everywhere = knots_of(positions, count)
    *knots, beyond = everywhere
    assert knots[:2] == [0, 1]
    assert len(knots) == count
    assert (torch.tensor(knots).diff() > 0).all()
    assert count == 2 or knots[-1] == positions - 1
    assert beyond > positions
    table = torch.randn(positions, 3, generator=torch.Generator().manual_seed(0)).double()
    *found, faded = place_vectors(table, everywhere)
    torch.testing.assert_close(faded, table[1:].mean(0))
    found = torch.stack(found)
    assert torch.equal(found[0], table[0])
    unit = torch.eye(len(knots)).double()
    lines = by_hand(range(positions), knots, unit)[1:, 1:]
    # The residual of the nearest lines is at a right angle to each of them.
    residual = table[1:] - lines @ found[1:]
    torch.testing.assert_close(lines.T @ residual, torch.zeros(len(knots) - 1, 3).double())
    if count == 2:
        return
    # A table of such lines is found again.
    own = by_hand(range(positions), knots, torch.arange(3 * len(knots)).view(-1, 3).double())
    again = by_hand(range(positions), everywhere, place_vectors(own, everywhere))
    torch.testing.assert_close(again, own)


def test_a_tenth_of_the_places_and_at_most_48():
    assert [most_places(n) for n in (512, 514, 64, 77, 10, 8192)] == [47, 47, 6, 7, 2, 47]
    assert len(knots_of(512, most_places(512))) == 48
    made = tisa.hf.convert(original("roberta"), **BARE)
    # Of 64 rows RoBERTa's first two are of no position.
    assert made.config.tisa["places"][:-1] == [2, 3, 11, 24, 42, 63]


def given_ways(name):
    """Return what a model is called with: padded on either side, or with places further on."""
    ids = inputs(2, 12, padded=False)["input_ids"]
    first = 2 * (name in ("roberta", "mpnet"))
    left = inputs(2, 12, padded=False)
    left["input_ids"][0, :4], left["attention_mask"][0, :4] = 1, 0
    places = first + torch.arange(3, 15).unsqueeze(0).expand(2, -1)
    return [inputs(), left, {"input_ids": ids, "position_ids": places}]


@EVERY_TABLE
def test_all_places_and_no_kernels_are_the_model_itself(name):
    """In every implementation, with the gradient of every weight; the table's by its places."""
    model = original(name).double()
    table = tisa.hf.families.position_table(model)
    rows = table.embedding.num_embeddings - table.first_row
    # MPNet's own table stays where no kernels are asked for.
    bare = {k: v for k, v in BARE.items() if name != "mpnet" or k != "num_kernels"}
    made = tisa.hf.convert(model, **bare, num_places=rows)
    (places,) = (module for module in made.modules() if isinstance(module, Places))
    ways = given_ways(name)
    for way in ways:
        real = way.get("attention_mask", torch.ones(2, 12)).bool()
        expected = model(**way).logits[real]
        wanted = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
        wanted = dict(zip((n for n, _ in model.named_parameters()), wanted, strict=True))
        for implementation in tiny.implementations(name):
            made.set_attn_implementation(implementation)
            found = made(**way).logits[real]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            if way is not ways[0]:
                continue
            made.zero_grad()
            found.square().mean().backward()
            of_table = next(n for n in wanted if n.split(".")[-2] in tisa.hf.core.TABLES)
            for key, parameter in made.named_parameters():
                if key.endswith(".places"):
                    of_rows = wanted[of_table][table.first_row :]
                    *found, faded = places.places.grad
                    torch.testing.assert_close(torch.stack(found), of_rows, rtol=1e-5, atol=1e-7)
                    assert not faded.any()
                elif "offset_scores" not in key:
                    torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-5, atol=1e-7)


@EVERY_TABLE
def test_any_length_is_taken_and_the_last_vector_stays(name):
    model = original(name)
    made = shake(tisa.hf.convert(model, positions="extend", init="zero", num_kernels=2,
                                 calibration=TOKENS))  # fmt: skip
    ids = inputs(2, 200, padded=False)["input_ids"]
    long = logits(made, input_ids=ids)
    assert torch.isfinite(long).all()
    last = made.config.tisa["places"][-1]
    assert last < 200
    first = made.config.tisa["places"][0]
    held = (first + torch.arange(200)).clamp(max=last).unsqueeze(0)
    (places,) = (module for module in made.modules() if isinstance(module, Places))
    assert torch.equal(places(held), places(first + torch.arange(200).unsqueeze(0)))
    # The same as with the places told one by one, which count on beyond the table.
    told = logits(made, input_ids=ids, position_ids=first + torch.arange(200).unsqueeze(0))
    torch.testing.assert_close(told, long)
    model_of_words = made.get_input_embeddings()(ids)
    torch.testing.assert_close(logits(made, inputs_embeds=model_of_words), long)


@EVERY_TABLE
def test_an_extended_model_is_saved_and_loaded(name, tmp_path):
    made = tisa.hf.convert(original(name), positions="extend", num_places=5,
                           **({} if name == "mpnet" else {"init": "zero"}))  # fmt: skip
    tisa.hf.save(made, tmp_path)
    again = tisa.hf.load(str(tmp_path)).eval()
    assert again.config.tisa["format"] == 3
    assert torch.equal(logits(again, **inputs()), logits(made, **inputs()))
    card = (tmp_path / "README.md").read_text()
    numbers = sum(p.numel() for n, p in made.named_parameters() if n.endswith(".places"))
    assert ("own table of the offset stays" in card) == (name == "mpnet")
    assert f"at {len(made.config.tisa['places'])} places are left ({numbers:,} numbers)" in card


def test_places_are_trained_with_the_scores():
    model = original("bert")
    made = tisa.hf.convert(model, positions="extend", num_kernels=1, init="zero")
    groups = tisa.hf.parameter_groups(made)
    (places,) = (p for n, p in made.named_parameters() if n.endswith(".places"))
    assert any(p is places for group in groups if group["lr"] > 5e-5 for p in group["params"])
    before = places.detach().clone()
    tisa.hf.distil(made, model, TOKENS[:2], steps=1, progress=bool)
    assert (places != before).any()


@pytest.mark.full
def test_an_extended_fit_is_of_what_the_places_leave():
    """With all places nothing is left to score, and the fit finds that."""
    model = original("bert")
    made = tisa.hf.convert(model, positions="extend", num_places=64, num_kernels=2,
                           calibration=TOKENS)  # fmt: skip
    for module in made.modules():
        if isinstance(module, tisa.TISA):
            assert module.scores(torch.arange(-12, 13)).abs().max() < 0.05
    torch.testing.assert_close(
        logits(made, **inputs()), logits(model, **inputs()), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("opt", {}, "OPTLearnedPositionalEmbedding counts its places by itself"),
        ("bert", {"num_places": 1}, "num_places must be a whole number from 2 to 64"),
        ("bert", {"num_places": 65}, "from 2 to 64, the table's positions, got 65"),
        ("bert", {"num_places": 5, "positions": "replace"}, 'num_places is for positions="extend"'),
        ("llama", {}, "rotations"),
    ],
)
def test_what_cannot_be_extended_says_why(name, settings, words):
    with pytest.raises(ValueError, match=words):
        tisa.hf.convert(original(name), **{"positions": "extend", **settings})


def test_a_table_of_the_offset_stays_unless_scores_are_asked_for():
    """MPNet without its absolute table: stock code whose table has the folded vectors."""
    model = original("mpnet")
    made = tisa.hf.convert(model, calibration=TOKENS)
    assert made.config.tisa["num_kernels"] == 0
    assert made.config.tisa["format"] == 3
    fold = made.get_input_embeddings().fold.detach()
    truth = copy.deepcopy(model)
    given = inputs(3, 11, padded=False)
    with torch.no_grad():
        table = truth.mpnet.embeddings.position_embeddings.weight
        table[2:] = fold[0]
        table[2], table[2 + 10] = fold[2], fold[1]
    for implementation in ("eager", "tisa"):
        made.set_attn_implementation(implementation)
        torch.testing.assert_close(
            logits(made, **given), logits(truth, **given), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(made.mpnet.encoder.relative_attention_bias.weight,
                       model.mpnet.encoder.relative_attention_bias.weight)  # fmt: skip
    for asked in ({"num_kernels": 0}, {"init": "zero"}, {"scoring": "near-far", "init": "zero"}):
        other = tisa.hf.convert(model, calibration=TOKENS, **asked)
        assert not other.config.tisa.get("keeps_relative_bias")
        assert "relative_attention_bias.weight" not in " ".join(other.state_dict())


@pytest.mark.full
@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_an_extended_model_is_a_graph_of_any_length(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="runs the exported graph")
    settings = {} if name == "mpnet" else {"init": "zero"}
    made = shake(
        tisa.hf.convert(original(name), positions="extend", calibration=TOKENS, **settings)
    )
    program = export_program(made).module()
    session = onnxruntime.InferenceSession(str(export_onnx(made, tmp_path / "model.onnx")))
    for batch, length in ((1, 5), (3, 19), (2, 100)):
        given = inputs(batch, length, padded=length > 7)
        real = given["attention_mask"].bool()
        expected = logits(made, **given)[real]
        with torch.no_grad():
            found = program(*given.values())[real]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        ran = session.run(None, {key: value.numpy() for key, value in given.items()})[0]
        torch.testing.assert_close(torch.tensor(ran)[real], expected, rtol=1e-4, atol=1e-4)
