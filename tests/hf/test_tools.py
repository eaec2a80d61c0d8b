"""Converted models in other people's tools: Trainer, peft, sentence encoders, ONNX; and ours."""

import json
import random
import re
import shutil
import string
import sys

import pytest
import torch
import transformers

import command
import tisa.hf
from own_methods import FUNCTION
from tiny import DECODERS, FAMILIES, SIZES, inputs, logits, original, shake, token_lists
from tisa.hf import measure
from tisa.hf.calibration import pieces
from tisa.hf.export import export_onnx, export_program
from tisa.hf.folder import convert_folder
from tisa.hf.saving import load_stock

TOKENS = token_lists(24)


def replaced(name="bert"):
    return shake(
        tisa.hf.convert(original(name), positions="replace", init="zero", calibration=TOKENS)
    ).eval()


def lines(count=40):
    generator = random.Random(0)
    words = ["".join(generator.sample(string.ascii_lowercase[:8], 2)) for _ in range(30)]
    return [" ".join(generator.sample(words, generator.randint(6, 20))) for _ in range(count)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny sentence encoder in a folder, as sentence-transformers has them."""
    folder = tmp_path_factory.mktemp("encoder")
    letters = list(string.ascii_lowercase)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + x for x in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SIZES, "pad_token_id": 0})
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6.0)
    model.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# An encoder\n")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("bert", "albert", "gpt2") else pytest.param(n, marks=pytest.mark.full)
        for n in FAMILIES
    ],
)
def test_trainer_fine_tunes_with_groups_of_our_own(name, tmp_path):
    model = tisa.hf.convert(original(name), positions="keep", init="zero")
    data = [{"input_ids": x[:8], "labels": x[:8]} for x in TOKENS if len(x) >= 8]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    groups = tisa.hf.parameter_groups(model, lr=1e-3, scores_lr=0.1, weight_decay=0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.0]
    assert groups[2]["lr"] == 0.1
    assert [g["lr"] for g in tisa.hf.parameter_groups(model)] == [5e-5, 5e-5, 5e-4]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=data, optimizers=(optimizer, schedule)
    )
    trainer.train()
    scores = [p for n, p in model.named_parameters() if "kernel_amplitudes" in n]
    # A kernel far after the query has nothing to look at in a causal model.
    share = 0.2 if name in DECODERS else 1.0
    assert all((p != 0).float().mean() >= share for p in scores)
    with pytest.raises(ValueError, match="no scores"):
        tisa.hf.parameter_groups(original("bert"), lr=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_peft_trains_adapters_and_scores_together():
    peft = pytest.importorskip("peft", reason="a development dependency")
    model = replaced()
    before = logits(model, **inputs())
    lora = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["offset_scores.0"])
    adapted = peft.get_peft_model(model, lora)
    torch.testing.assert_close(logits(adapted, **inputs()), before)
    adapted(**inputs(), labels=inputs()["input_ids"]).loss.backward()
    trained = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert any("lora" in n for n in trained)
    assert any("kernel_offsets" in n for n in trained)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, **inputs()), before)


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_load_a_converted_encoder(encoder, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="a development dependency")
    out = tmp_path / "out"
    done = convert_folder(str(encoder), out, init="zero", texts=lines())
    loaded = library.SentenceTransformer(str(out), device="cpu")
    # As the card says.
    card, said = (out / "README.md").read_text(), {}
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(code.replace("path/to/this/folder", str(out)), said)
        said[type(said["model"]).__name__] = said["model"]
    assert {"SentenceTransformer", "TisaBertModel"} <= set(said)
    assert "library_name: sentence-transformers\nlicense: apache-2.0\n" in card
    text = " ".join(lines(30))
    found = torch.from_numpy(loaded.encode([text]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length > 10**5
    given = tokenizer([text], return_tensors="pt")
    assert given["input_ids"].shape[1] > 200
    with torch.no_grad():
        expected = done.converted.base_model(**given)[0].mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_head_that_the_checkpoint_lacks_is_left_out(name, tmp_path):
    whole = original(name)
    base = whole.base_model
    base.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {**config, "architectures": [type(whole).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    with pytest.warns(UserWarning, match=r"lacks the head's weights .*, as (Bert|MPNet)Model$"):
        found, *_ = load_stock(str(tmp_path))
    assert type(found).__name__ == config["architectures"][0]
    with torch.no_grad():
        assert torch.equal(found(**inputs())[0], base(**inputs())[0])


def test_torn_weights_are_said_in_a_sentence(tmp_path):
    original("bert").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"is truncated or corrupted .*; download it again"):
        load_stock(str(tmp_path))


def test_a_score_of_ones_own_lies_in_the_folder_of_the_call(tmp_path, monkeypatch):
    from tisa.cli.convert import _function

    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score_of_mine.py").write_text("def found(model, tokenizer):\n    return 7\n")
    assert _function("score_of_mine:found")(None, None) == 7
    for name in ("nobody_has_it:found", "nobody_has_it.inside:found"):
        with pytest.raises(ValueError, match="score: no module nobody_has_it here"):
            _function(name)
    # What a module of theirs lacks is another matter.
    (tmp_path / "needs_more.py").write_text("import nobody_has_it")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nobody_has_it'"):
        _function("needs_more:found")


@pytest.mark.parametrize("name", ["albert", "bert", "gpt2", "mpnet", "roberta"])
def test_weights_that_are_tied_need_not_be_in_the_checkpoint(name, tmp_path):
    from safetensors.torch import load_file, save_file

    whole = original(name)
    whole.save_pretrained(tmp_path)
    tied = {key for pair in whole.all_tied_weights_keys.items() for key in pair}
    assert tied
    kept = load_file(tmp_path / "model.safetensors")
    # One name of a weight is there, as saved. Buffers are not, as older checkpoints have them.
    assert len(tied & kept.keys()) == len({id(whole.get_parameter(key)) for key in tied})
    buffers = {key for key, _ in whole.named_buffers()}
    save_file(
        {k: v for k, v in kept.items() if k not in buffers},
        tmp_path / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    found, *_ = load_stock(str(tmp_path))
    assert type(found) is type(whole)
    assert torch.equal(logits(found, **inputs()), logits(whole, **inputs()))


@pytest.fixture
def hub(encoder, tmp_path, monkeypatch):
    """The hub's cache without the hub, in which the encoder is somebody/little."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "hub" / "models--somebody--little"
    snapshot = cache / "snapshots" / ("0123456789" * 4)
    shutil.copytree(encoder, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(snapshot.name)
    # As on the hub: a module without settings is listed, and has no folder.
    listed = json.loads((snapshot / "modules.json").read_text())
    normalize = "sentence_transformers.models.Normalize"
    listed.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": normalize})
    (snapshot / "modules.json").write_text(json.dumps(listed))
    return snapshot


def test_a_sentence_encoder_by_its_name_on_the_hub(hub, tmp_path):
    out = tmp_path / "out"
    convert_folder("somebody/little", out, init="zero", texts=lines())
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (hub / name).read_bytes()
    assert (out / "2_Normalize").is_dir()
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] > 10**5
    assert json.loads((hub / "sentence_bert_config.json").read_text())["max_seq_length"] == 64


def test_a_sentence_encoder_that_the_cache_has_in_part(hub, tmp_path):
    out = tmp_path / "out"
    shutil.rmtree(hub / "1_Pooling")
    with pytest.raises(ValueError, match=r"1_Pooling .* hf download somebody/little"):
        convert_folder("somebody/little", out, init="zero", texts=lines())
    (hub / "modules.json").unlink()
    with pytest.warns(UserWarning, match=r"modules\.json is not in the hub's cache"):
        convert_folder("somebody/little", out, init="zero", texts=lines())
    assert (out / "model.safetensors").is_file()
    # Known not to be on the hub: this is no sentence encoder.
    missing = hub.parent.parent / ".no_exist" / hub.name / "modules.json"
    missing.parent.mkdir(parents=True)
    missing.touch()
    convert_folder("somebody/little", tmp_path / "other", init="zero", texts=lines())


def test_modules_are_looked_for_in_their_own_folder_only(hub):
    listed = [{"idx": 0, "name": "0", "path": "../../elsewhere", "type": "any"}]
    (hub / "modules.json").write_text(json.dumps(listed))
    for name in ("somebody/little", str(hub)):
        with pytest.raises(ValueError, match="no folder inside"):
            tisa.hf.save(replaced(), hub / "out", beside=name)


def of_any_size(model):
    """Yield inputs of several batches and lengths, which of their tokens are real, and logits."""
    for batch, length in ((1, 5), (3, 19), (4, 100)):
        given = inputs(batch, length, padded=length > 7)
        real = given["attention_mask"].bool()
        yield given, real, logits(model, **given)[real]


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_takes_any_batch_and_length():
    model = replaced()
    program = export_program(model).module()
    for given, real, expected in of_any_size(model):
        torch.testing.assert_close(program(*given.values())[real], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.unchecked
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "albert"])
def test_onnx_takes_any_batch_and_length(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="a development dependency")
    model = replaced(name)
    session = onnxruntime.InferenceSession(str(export_onnx(model, tmp_path / "model.onnx")))
    for given, real, expected in of_any_size(model):
        (found,) = session.run(None, {k: v.numpy() for k, v in given.items()})
        torch.testing.assert_close(torch.from_numpy(found)[real], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.unchecked
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_has_the_scores():
    model = replaced()
    given = inputs()
    real = given["attention_mask"].bool()
    expected = logits(model, **given)[real]
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(logits(model, **given)[real], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.unchecked
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_the_model():
    model = replaced()
    compiled = torch.compile(model)
    for length in (11, 17):
        given = inputs(3, length)
        real = given["attention_mask"].bool()
        torch.testing.assert_close(
            logits(compiled, **given)[real], logits(model, **given)[real], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_distilling_brings_the_model_nearer_and_touches_nothing_else(name, tmp_path):
    model = original(name)
    converted = tisa.hf.convert(model, positions="replace", init="reference", calibration=TOKENS)
    kept = {n: p.clone() for n, p in converted.named_parameters()}
    told = []
    mask = 5 if name == "bert" else None
    losses = tisa.hf.distil(
        converted, model, TOKENS, steps=25, mask_token_id=mask, progress=told.append
    )
    assert len(told) == len(losses) <= 25
    assert sum(losses[-5:]) < sum(losses[:5])
    assert told[-1].held_out < 1
    for n, p in converted.named_parameters():
        assert torch.equal(p, kept[n]) != ("offset_scores" in n or n.endswith(".fold")), n
        assert p.requires_grad


def test_all_lengths_have_as_many_steps_where_that_is_asked_for():
    from tisa.hf.calibration import Tokens
    from tisa.hf.distillation_loss import batches_by

    sequences = [Tokens([2, *[7] * (n - 2), 3]) for n in [8] * 400 + [32] * 8 + [60] * 2]
    batches = batches_by(sequences, original("bert"), 0, 2048, True)
    lengths = [batch.inputs["input_ids"].shape[1] for batch in batches]
    assert {n: lengths.count(n) for n in set(lengths)} == {8: 13, 32: 13, 60: 13}
    assert set(lengths[:3]) == {8, 32, 60}


def test_distilling_goes_on_where_it_stopped(tmp_path):
    model = original("bert")
    settings = dict(steps=20, progress=lambda told: None)

    def fresh():
        torch.manual_seed(3)
        return tisa.hf.convert(model, positions="replace", init="reference", calibration=TOKENS)

    whole, parts = fresh(), fresh()
    expected = tisa.hf.distil(whole, model, TOKENS, **settings)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(told):
        if told.step == 13:
            raise Stop

    file = tmp_path / "distil.pt"
    with pytest.raises(Stop):
        tisa.hf.distil(parts, model, TOKENS, steps=20, checkpoint=file, progress=stop)
    again = fresh()
    found = tisa.hf.distil(again, model, TOKENS, checkpoint=file, **settings)
    assert found == expected
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    other = tisa.hf.convert(original("gpt2"), positions="keep", init="zero")
    with pytest.raises(ValueError, match="another model"):
        tisa.hf.distil(other, original("gpt2"), TOKENS, checkpoint=file, **settings)
    fewer = tisa.hf.convert(
        model, positions="replace", init="zero", calibration=TOKENS, num_kernels=1
    )
    with pytest.raises(ValueError, match="another model"):
        tisa.hf.distil(fewer, model, TOKENS, checkpoint=file, **settings)


def test_what_cannot_be_measured_is_written_all_the_same(encoder, tmp_path):
    # One word each: no other order of them. Longer than the 64 positions, too.
    words = ["abcdefgh" * 12, "hgfedcba" * 12, "acegbdfh" * 12, "abcdhgfe" * 12]
    done = convert_folder(str(encoder), tmp_path / "words", init="zero", texts=words, measured=True)
    assert "order-match" not in done.after
    assert 0 <= done.after["masked-token accuracy"] <= 1
    long = [" ".join(lines(6)) for _ in range(4)]
    done = convert_folder(str(encoder), tmp_path / "long", init="zero", texts=long, measured=True)
    assert 0 <= done.after["order-match"] <= 1

    def wrong(model, tokenizer):
        raise RuntimeError("no score today")

    with pytest.raises(ValueError, match=r"broken is written, but .* no score today"):
        convert_folder(
            str(encoder), tmp_path / "broken", init="zero", texts=lines(), measured=wrong
        )
    assert (tmp_path / "broken" / "model.safetensors").is_file()


def test_a_page_that_cannot_be_written_leaves_no_model_without_it(encoder, tmp_path):
    # The folder would be refused when the same command is started again.
    def full(done, folder):
        assert (folder / "model.safetensors").is_file()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        convert_folder(str(encoder), tmp_path / "out", init="zero", texts=lines(), finish=full)
    assert list(tmp_path.iterdir()) == []


def test_texts_are_measured_without_a_token_to_pad_with(encoder):
    model, tokenizer, _ = load_stock(str(encoder))
    wanted = measure.embeddings(model, tokenizer, lines(5))
    tokenizer.pad_token = None
    torch.testing.assert_close(measure.embeddings(model, tokenizer, lines(5)), wanted)


def test_order_match_is_chance_without_positions(encoder):
    model, tokenizer, _ = load_stock(str(encoder))
    blind = tisa.hf.convert(
        model, positions="replace", init="zero", calibration=lines(), tokenizer=tokenizer
    )
    assert measure.order_match(blind, model, tokenizer, lines(8)) == pytest.approx(0.25)
    assert measure.order_match(model, model, tokenizer, lines(8)) == 1.0
    assert measure.order_match(model, model, tokenizer, lines(8), shuffles=True) == 1.0
    by = measure.cosine_by_length(model, model, tokenizer, lines(), (8, 16))
    assert by == pytest.approx({8: 1.0, 16: 1.0}, abs=1e-4)


def test_pieces_have_the_lengths_asked_for(encoder):
    _, tokenizer, _ = load_stock(str(encoder))
    found = [len(tokenizer(x)["input_ids"]) for x in pieces(lines(), tokenizer, (8, 60))]
    assert min(found) < 15
    assert 40 < max(found) < 90


def test_the_command_line(encoder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines()))
    out = tmp_path / "out"
    call = ["convert", str(encoder), "--out", str(out), "--text", str(text), "--report", "--json",
            "--num-kernels", "2", "--lengths", "8,40", "--distil-minutes", "0.01"]  # fmt: skip
    plan = command.tisa_([*call, "--dry-run"])
    assert plan.exit_code == 0, plan.output
    assert json.loads(plan.stdout)["layers"] == 2
    assert not out.exists()
    shown = command.tisa_(call)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    numbers = json.loads(shown.stdout.strip().splitlines()[-1])
    assert "masked-token accuracy" in numbers["after"]
    card = (out / "README.md").read_text()
    assert len(numbers["verdict"]) >= 3
    assert all(f"- {line}\n" in card for line in numbers["verdict"])
    assert 0.0 <= numbers["after"]["order-match"] <= 1.0
    page = (out / "report.html").read_text()
    assert "report.html" in json.loads((out / "manifest.json").read_text())["files"]
    assert page.count('<button type="button" class="head"') == 2 * 4
    assert set(re.findall(r"https?://[^\s\"')]+", page)) == {"http://www.w3.org/2000/svg"}
    model = transformers.AutoModelForMaskedLM.from_pretrained(out)
    assert type(model).__name__ == "TisaBertForMaskedLM"
    again = command.tisa_(call)
    assert isinstance(again.exception, FileExistsError)
    assert "there already" in str(again.exception)


def test_the_command_line_with_a_function_of_ones_own(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root.py").write_text(FUNCTION)
    (tmp_path / "text.txt").write_text("\n".join(lines()))
    call = ["convert", str(encoder), "--text", "text.txt", "--out", "out", "--report"]
    shown = command.tisa_([*call, "--scoring", "root.py:Root:start=0.1"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Scores: root.py:Root." in page
    assert page.count('<button type="button" class="head"') == 2 * 4


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--scoring", "rotary"], "scoring must be a function of the offset"),
        (["--lengths", "many"], "expected two whole numbers with commas"),
        (["--positions", "both"], "positions"),
        (["--score", "nowhere"], "module:function"),
        (["--score", "json:nothing"], "nothing"),
        (["--distil-minutes", "0"], "above 0"),
        (["--device", "no-such"], "device"),
        (["--text", "EMPTY"], "some text"),
        (["--text", "BINARY"], "UTF-8"),
        (["--lengths", "8,4000"], "up to 64 tokens"),
    ],
)
def test_mistakes_on_the_command_line(encoder, tmp_path, more, words):
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    more = [str(tmp_path / x) if x.isupper() else x for x in more]
    out = tmp_path / "out"
    shown = command.tisa_(["convert", str(encoder), "--out", str(out), *more])
    assert words in str(shown.exception)
    assert not out.exists()


def test_the_built_in_text_serves_where_none_is_given_and_says_so(encoder):
    model, tokenizer, _ = load_stock(str(encoder))
    with pytest.warns(UserWarning, match="built-in English"):
        converted = tisa.hf.convert(model, positions="replace", init="zero", tokenizer=tokenizer)
    assert converted.config.tisa["first_token_id"] == tokenizer.cls_token_id
    assert converted.config.tisa["last_token_id"] == tokenizer.sep_token_id
