"""Long texts: what is asked is there, ways of reading are what they are called, pairs are pairs."""

import importlib.util
import json
import math
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import command
from tisa_lab.long.encoders import Encoder, chunks, ends_of, mean, overlapping, weighted_mean
from tisa_lab.long.jobs import ranks
from tisa_lab.long.measuring import options_of, summary
from tisa_lab.long.pairs import paired, sign_test
from tisa_lab.long.places import longer, longer_rows, scaled
from tisa_lab.long.readings import ONE, SEVERAL, affordable, operations, ways_of
from tisa_lab.long.report import cell, markdown
from tisa_lab.long.settings import FAMILIES, LongConfig
from tisa_lab.long.tasks import asked_of
from tisa_lab.long.texts import cut, sentences_of, texts_of

ROOT = Path(__file__).parents[2]
LIMIT, ROOM = 40, 190
WORDS = [f"{a}{b}" for a, b in product("bdfgklmnprst", "aeiou")]


def vocabulary():
    marks = [".", "?", "'", ","]
    from tisa_lab.long import tasks

    names = " ".join(
        [*tasks.FIRST, *tasks.LAST, *tasks.COLOURS, *tasks.THINGS, *tasks.SPOTS, *tasks.FILLER]
    )
    others = "The of lies Where does lie s pass key is Remember it the for What Junior x a"
    found = [*WORDS, *(word.capitalize() for word in WORDS), *names.replace(".", "").split()]
    return list(
        dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *marks, *found, *others.split()])
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny sentence encoder that takes 40 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = tmp_path_factory.mktemp("long") / "tiny"
    words = {word: number for number, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=LIMIT,
    ).save_pretrained(made)  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=LIMIT, pad_token_id=0,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModel.from_pretrained(folder).eval()


def document(number, sentences):
    drawn = np.random.default_rng(number)
    made = [" ".join(drawn.choice(WORDS, size=9)).capitalize() + "." for _ in range(sentences)]
    return f"= Number {number} =\n" + " ".join(made)


def written():
    return [*(document(i, 22) for i in range(40)), *(document(99 + i, 30) for i in range(9))]


@pytest.fixture(scope="module")
def texts(tokenizer):
    return texts_of(written(), tokenizer, count=5, longest=ROOM + 2)


@pytest.fixture(scope="module")
def asked(texts, tokenizer):
    config = LongConfig(documents=7, queries=3, seeds=(0, 1))
    return asked_of(config, texts, tokenizer, ROOM + 2, ROOM)


def test_a_document_is_its_sentences_without_headings(tokenizer):
    text = '= A title =\nHe said "No." Then he left! A\n\nIt was 3.5 miles. 12 came.\n= End =\n'
    told = ['He said "No.', "Then he left!", "A", "It was 3.5 miles.", "12 came."]
    assert sentences_of(text) == told
    whole = tokenizer("Ba be. Bi bo.", add_special_tokens=False)["input_ids"]
    assert [i for s in cut(["Ba be.", "Bi bo."], tokenizer) for i in s.ids] == whole


def test_no_text_serves_two_ends(texts):
    articles = [" ".join(s.text for s in article) for article in texts.articles]
    noise = " ".join(s.text for s in texts.noise)
    assert len(articles) == 5
    assert len(texts.calibration) == 24
    for one in articles:
        assert one not in noise
        assert all(one not in other for other in texts.calibration)
    assert all(other not in noise for other in texts.calibration)
    assert all(sum(len(s.ids) for s in article) >= ROOM + 2 for article in texts.articles)


def test_too_little_text_is_told(tokenizer):
    with pytest.raises(ValueError, match=r"expected 50 articles of 192 tokens.*give more text"):
        texts_of(written(), tokenizer, count=50, longest=192)


def test_what_is_asked_is_where_it_is_said_to_be(asked, tokenizer):
    seen = set()
    for one in asked:
        seen.add((one.task, one.haystack, one.seed))
        assert {len(ids) for ids in one.documents} == {ROOM}
        for query, number, place in zip(one.queries, one.wanted, one.places, strict=True):
            ids = one.documents[number]
            given = tokenizer(query, add_special_tokens=False)["input_ids"]
            told = tokenizer.decode(ids[max(place, 0) :])
            if one.task == "passkey":
                name = query.removeprefix("What is the pass key for ").removesuffix("?")
                assert told.replace(" ' ", "'").startswith(f"{name}'s pass key is")
                assert all(name not in tokenizer.decode(d) for d in one.documents if d != ids)
            elif one.task == "needle":
                thing = query.removeprefix("Where does the ").removesuffix(" lie?")
                assert told.startswith(f"The {thing} lies")
            elif one.task == "article, removed":
                assert tuple(given) not in set(
                    zip(*(ids[i:] for i in range(len(given))), strict=False)
                )
            else:
                assert list(ids[place : place + len(given)]) == given
                if one.task == "article, last eighth":
                    assert place + len(given) / 2 >= ROOM * 7 / 8
    hidden = {
        (t, h, s) for t in ("passkey", "needle") for h in ("filler", "articles") for s in (0, 1)
    }
    others = {
        (t, "", s)
        for name in ("article", "eighth", "removed")
        for t in FAMILIES[name]
        for s in (0, 1)
    }
    assert seen == hidden | others
    # Another seed, other places.
    first, second = (one for one in asked if one.task == "needle" and one.haystack == "filler")
    assert first.places != second.places


def test_filler_is_the_same_everywhere_but_for_what_is_hidden(asked):
    (one, *_) = (one for one in asked if one.task == "needle" and one.haystack == "filler")
    filler = {token for ids in one.documents for token in ids[-3:]}
    assert len(filler) < 20


@pytest.mark.parametrize("kind", ["interpolated", "grouped", "repeated"])
@pytest.mark.parametrize("length", [3, 7, 8, 20])
def test_more_places_are_those_of_the_formulas(kind, length):
    rows = torch.randn(7, 3, dtype=torch.float64)
    found = longer_rows(rows, length, kind)
    scale = -(-length // 7)
    for p in range(length):
        if kind == "repeated":
            wanted = rows[p % 7]
        elif kind == "grouped":
            wanted = rows[math.floor(p / scale)]
        else:
            wanted = torch.tensor([np.interp(p / scale, range(7), column) for column in rows.T])
        torch.testing.assert_close(found[p], wanted)


def test_a_longer_table_and_scaled_logits_change_nothing_within_the_limit(model):
    ids = torch.randint(4, 60, (2, 31))
    with torch.no_grad():
        wanted = model(input_ids=ids)[0]
        torch.testing.assert_close(longer(model, LIMIT, "interpolated")(input_ids=ids)[0], wanted)
        heads = model.encoder.layer[0].attention.self
        before = heads.scaling
        with scaled(model, 2.0):
            assert heads.scaling == 2 * before
            flat = model(input_ids=ids)[0]
            heads.query.weight.mul_(0.5)
            heads.query.bias.mul_(0.5)
            torch.testing.assert_close(model(input_ids=ids)[0], wanted)
            heads.query.weight.mul_(2)
            heads.query.bias.mul_(2)
        assert (flat - wanted).abs().max() > 1e-3
        assert heads.scaling == before


def encoder(model, tokenizer, batch_tokens=100):
    return Encoder(model, tokenizer, "", batch_tokens, False)


def read(ways, name, model, tokenizer, documents):
    (way,) = (way for way in ways if way.name == name)
    around = partial(encoder, tokenizer=tokenizer)
    with torch.inference_mode():
        return way.read(around(model), documents, around)


def alone(model, ids):
    """Return the hidden states of a text with its ends."""
    given = torch.tensor([[2, *ids, 3]])
    places, types = torch.arange(given.shape[1])[None], torch.zeros_like(given)
    with torch.no_grad():
        return model(input_ids=given, position_ids=places, token_type_ids=types)[0][0]


def unit(vector):
    return vector / vector.norm()


def test_vectors_are_means_of_pieces_and_of_stretches(model, tokenizer):
    assert ends_of(tokenizer) == ([2], [3])
    ways = ways_of(model, [], 32, LIMIT)
    documents = [torch.randint(4, 60, (n,)).tolist() for n in (83, 83, 60)]
    found = read(ways, "pieces of 32", model, tokenizer, documents)
    within = read(ways, f"late chunks of 32, pieces of {LIMIT}", model, tokenizer, documents)
    cut_off = read(ways, f"cut at {LIMIT}", model, tokenizer, documents)
    for number, ids in enumerate(documents):
        parts = [ids[i : i + 30] for i in range(0, len(ids), 30)]
        each = [unit(alone(model, part).mean(0)) for part in parts]
        torch.testing.assert_close(found["best of pieces of 32"][number], torch.stack(each))
        one = unit(sum(len(p) * v for p, v in zip(parts, each, strict=True)))
        torch.testing.assert_close(found["mean of pieces of 32"][number][0], one)
        # 38 tokens of text fit, which is one whole chunk of 30.
        late = torch.stack([unit(alone(model, part)[1:-1].mean(0)) for part in parts])
        torch.testing.assert_close(within[f"late chunks of 32, pieces of {LIMIT}"][number], late)
        first = unit(alone(model, ids[:38]).mean(0))
        torch.testing.assert_close(cut_off[f"cut at {LIMIT}"][number][0], first)


def test_late_chunks_have_the_ends_of_pieces(model, tokenizer):
    ids = torch.randint(4, 60, (83,)).tolist()
    reader = encoder(longer(model, 90, "grouped"), tokenizer)
    (found,) = reader.read([ids], chunks(1, 1, 30))
    hidden = alone(reader.model, ids)[1:-1]
    wanted = [unit(hidden[i : i + 30].mean(0)) for i in (0, 30, 60)]
    torch.testing.assert_close(found, torch.stack(wanted))
    # A prefix is read, and stands in no stretch.
    prefixed = Encoder(reader.model, tokenizer, "Where does", 500, False)
    assert prefixed.ends == 4
    (mean_of,) = prefixed.read([ids], mean)
    words = tokenizer("Where does", add_special_tokens=False)["input_ids"]
    torch.testing.assert_close(mean_of[0], unit(alone(reader.model, [*words, *ids]).mean(0)))


def test_pieces_that_overlap_cost_one_pass_and_leave_nothing_out(model):
    # 1 layer, 16 wide: q, k, v and out, and two of the feed-forward; scores and their sums.
    assert operations(model, 100) == 100 * (4 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 100)
    count = affordable(model, 400, 32)
    assert count == operations(model, 400) // operations(model, 32) > 13
    parts = overlapping(list(range(400)), 30, count)
    assert len(parts) == count
    assert {len(part) for part in parts} == {30}
    assert {i for part in parts for i in part} == set(range(400))
    assert weighted_mean([torch.eye(2)[:1], torch.eye(2)[1:]], [3, 4]).tolist() == [
        pytest.approx([0.6, 0.8])
    ]


def test_who_sees_nothing_finds_nothing():
    same = [torch.ones(1, 3)] * 4
    assert ranks(torch.rand(2, 3), same, [0, 3]) == [4, 4]
    documents = [torch.eye(3)[:1], torch.eye(3)[1:], 0.5 * torch.ones(1, 3)]
    assert ranks(torch.tensor([[0.0, 0.1, 1.0], [0.9, 0.3, 0.0]]), documents, [1, 2]) == [1, 2]


def test_pairs_are_of_one_query_and_drawn_by_document():
    first, second = [True] * 30 + [False] * 10, [False] * 6 + [True] * 20 + [False] * 14
    found = paired(first, second, range(40))
    assert found.difference == pytest.approx(10 / 40)
    assert (found.better, found.worse) == (10, 0)
    assert found.p == pytest.approx(2 / 2**10)
    spread = np.std(np.subtract(first, second, dtype=float)) / math.sqrt(40)
    assert found.low == pytest.approx(0.25 - 1.96 * spread, abs=0.03)
    assert found.high == pytest.approx(0.25 + 1.96 * spread, abs=0.03)
    # Ten queries about each of four documents are four draws, not forty.
    wide = paired(first, second, [i // 10 for i in range(40)])
    assert wide.high - wide.low > 1.2 * (found.high - found.low)
    assert paired(first, first, range(40)).p == 1.0
    with pytest.raises(ValueError, match="as many answers as groups"):
        paired(first, second, [1])


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 3), (9, 2), (2, 9)])
def test_the_sign_test_is_the_binomial(better, worse):
    total = better + worse
    each = [Fraction(math.comb(total, k), 2**total) for k in range(total + 1)]
    wanted = sum(p for p in each if p <= each[better])
    assert sign_test(better, worse) == pytest.approx(float(wanted))


def test_what_is_converted_is_said_in_a_word():
    assert options_of("replace") == {"positions": "replace"}
    assert options_of("extend:num_places=20:window=128:sinks=ends:shared=False") == {
        "positions": "extend", "num_places": 20, "window": 128, "sinks": "ends", "shared": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="extend:num_places=20"):
        options_of("extend:20")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(tasks=("lemon",)), "tasks must be some of passkey"),
        (dict(haystacks=()), "haystacks must be some of filler, articles, got none"),
        (dict(lengths=(64,)), "lengths must be whole numbers from 128"),
        (dict(documents=1), "documents must be at least 2, got 1"),
        (dict(seeds=()), "seeds must be one or more"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        LongConfig(**settings)


WORDS_OF_IT = ["--data", "text.txt", "--lengths", "192", "--documents", "3", "--chunk", "32",
               "--calibration", "8", "--queries", "2", "--device", "cpu", "--haystacks", "articles",
               "--tasks", "passkey,article", "--out", "new"]  # fmt: skip


def test_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(written()))
    words = ["long", str(folder), *WORDS_OF_IT]
    windowed = "extend:init=reference:window=16:sinks=ends"
    shown = command.lab([*words, "--converted", f"replace:init=reference,{windowed}"])
    assert shown.exit_code == 0, shown.exception
    out = tmp_path / "new"
    record = json.loads((out / "long.json").read_text())
    assert (out / "long.md").read_text() == markdown(record) == shown.stdout
    assert (out / "long.png").stat().st_size > 5000
    rows = {(row["row"], row["task"]): row for row in record["rows"]}
    names = {name for name, _ in rows}
    assert {"PI", "GP, logits scaled", "fold only", "late chunks of 32, fold only",
            "mean of pieces of 32", f"cut at {LIMIT}", windowed} < names  # fmt: skip
    one = rows["late chunks of 32, replace:init=reference", "article"]
    assert (one["kind"], one["vectors"], one["queries"]) == (SEVERAL, 7, 6)
    assert rows["PI", "passkey"]["kind"] == ONE
    # What is told of a row is what its queries' ranks say.
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    found = [row for line in lines for row in line["rows"]]
    wanted = {one["asked"]: one["wanted"] for one in record["asked"]}
    assert summary(found, wanted, 32) == record["rows"]
    for wrong, message in (
        (["--chunk", "64"], f"--chunk must be at most {LIMIT}"),
        (["--documents", "99"], "data: expected 99 articles"),
    ):
        assert message in command.lab([*words[:-1], "other", *wrong]).stderr


@pytest.mark.full
def test_the_command_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(written()))
    words = ["long", str(folder), *WORDS_OF_IT, "--json", "--converted"]
    first = command.lab([*words, "replace:init=reference"])
    before = (tmp_path / "new" / "records.jsonl").read_text()
    again = command.lab([*words, "replace:init=reference,replace:init=zero"])
    assert again.exit_code == 0, again.exception
    after = (tmp_path / "new" / "records.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    rows = json.loads(first.stdout)["rows"]
    assert json.loads(again.stdout)["rows"][: len(rows)] == rows


def test_a_cell_says_by_how_much():
    row = {"accuracy": 0.875, "against": {"difference": -0.031, "low": -0.09, "high": 0.02}}
    assert cell(row) == "88 (−3: −9 … +2)"
    assert cell({"accuracy": 0.5}) == "50"
    assert cell(None) == "–"


def test_the_page_has_the_tables_of_the_record():
    source = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(source)
    source.loader.exec_module(tables)
    page = (ROOT / "docs/long.md").read_text()
    assert tables.page(page, tables.PAGES["long.md"]) == page, "run: python docs/tables.py"
    for name in ("2026-11-19-long", "2026-11-20-long-hidden"):
        folder = ROOT / "docs/records" / name
        record = json.loads((folder / "long.json").read_text())
        assert (folder / "long.md").read_text() == markdown(record)
        # What is told of a record is what its queries' ranks say.
        lines = (folder / "records.jsonl").read_text().splitlines()
        rows = [row for line in lines for row in json.loads(line)["rows"]]
        wanted = {one["asked"]: one["wanted"] for one in record["asked"]}
        found = {(r["row"], r["length"], r["task"]): r for r in summary(rows, wanted, 128)}
        assert len(found) == len(record["rows"])
        for row in record["rows"]:
            assert found[row["row"], row["length"], row["task"]] == row
        # And what is said of it.
        beside = [row for row in record["rows"] if "against" in row]
        worse = {row["row"] for row in beside if row["against"]["high"] < 0}
        if name == "2026-11-19-long":
            assert worse == {"cut at 512"}
            assert all(row["against"]["low"] <= 0 for row in beside)
        else:
            far = {row["row"]: row["against"] for row in beside if row["task"] == "needle"}
            late = [pair for row, pair in far.items() if row.startswith("late chunks")]
            assert len(late) == 4
            assert all(pair["high"] < 0 for pair in late)
            assert all(
                row["accuracy"] < 0.35
                for row in beside
                if row["kind"] == ONE and row["length"] == 1024
            )
