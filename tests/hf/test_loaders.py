"""A wrong file, given to every loader: one sentence, exit code 2, nothing written, nothing run."""

import errno
import hashlib
import json
import pickle
import shutil
import string
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import command
import tisa.hf
import tisa.transformer
from tiny import FAMILIES, original
from tisa.hf.saving import load_stock
from tisa.weights import read_checkpoint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of each folder: a weight in its first layer.
QUERY = {
    "stock": "bert.encoder.layer.0.attention.self.query.weight",
    "converted": "bert.encoder.layer.0.attention.self.query.weight",
    "own": "transformer.blocks.0.attention.query.weight",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A stock BERT with its tokenizer, the same converted, and a transformer of our own."""
    place = tmp_path_factory.mktemp("loaders")
    stock = place / "stock"
    stock.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    (stock / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(stock / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(stock)
    original("bert").save_pretrained(stock)
    model = tisa.hf.convert(original("bert"), positions="keep", init="zero", num_kernels=2)
    model.save_pretrained(place / "converted")
    sizes = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    own = tisa.transformer.LanguageModel(tisa.TransformerConfig(**sizes))
    tisa.transformer.save(own, place / "own")
    return place


def called(function):
    """Return the answer of a function as a command gives it."""

    def answer(folder, out):
        return command.answer(
            SimpleNamespace(call=lambda _: function(folder), name="", said=lambda w, _: str(w)), []
        )

    return answer


def converted(folder, out):
    texts = folder.parent / "texts.txt"
    texts.write_text("a b c d e f g\nb c d e f g a h\n")
    return command.tisa_(
        ["convert", folder, "--out", out, "--positions", "keep", "--init", "zero", "--text", texts]
    )


LOADERS = {
    "convert": ("stock", converted),
    "analyze": ("stock", lambda f, out: command.tisa_(["analyze", f, "--out", out])),
    "load": ("converted", called(lambda folder: tisa.hf.load(str(folder)))),
    "transformer.load": ("own", called(tisa.transformer.load)),
    "AutoModel": (
        "converted",
        called(lambda folder: transformers.AutoModelForMaskedLM.from_pretrained(folder)),
    ),
}
# The loaders that are ours from the file on.
OURS = ("convert", "analyze", "load", "transformer.load")
SHARDED = ("convert", "analyze", "load")


def tensors(change):
    def spoil(folder, query):
        found = load_file(folder / WEIGHTS)
        assert query in found
        save_file(change(found, query), folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def config(**values):
    def spoil(folder, query):
        own = json.loads((folder / "config.json").read_text())
        # Our own transformers have theirs inside.
        own.get("config", own).update(values)
        (folder / "config.json").write_text(json.dumps(own))

    return spoil


def sharded(change):
    def spoil(folder, query):
        whole = load_file(folder / WEIGHTS)
        names = sorted(whole)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({n: whole[n] for n in own}, folder / file, metadata={"format": "pt"})
        (folder / WEIGHTS).unlink()
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        change(folder, whole, parts, index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def outside(folder, whole, parts, weight_map):
    (folder / "b.safetensors").rename(folder.parent / "b.safetensors")
    for name in parts["b.safetensors"]:
        weight_map[name] = "../b.safetensors"


def twice(folder, whole, parts, weight_map):
    name = parts["b.safetensors"][0]
    more = {n: whole[n] for n in parts["a.safetensors"]} | {name: whole[name] + 1}
    save_file(more, folder / "a.safetensors", metadata={"format": "pt"})


def absent(folder, whole, parts, weight_map):
    fewer = {n: whole[n] for n in parts["a.safetensors"][1:]}
    save_file(fewer, folder / "a.safetensors", metadata={"format": "pt"})


def link(folder, query):
    shutil.move(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to("../elsewhere.safetensors")


def cut(folder, query):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code in a pickle was run",))


def evil(folder, query):
    (folder / WEIGHTS).unlink()
    torch.save({query: Evil()}, folder / "pytorch_model.bin", pickle_module=pickle)


def remote(folder, query):
    (folder / "mine.py").write_text("raise SystemExit('code beside a model was run')")
    config(model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModel": "mine.M"})(folder, "")


# What is wrong, what is said of it, and who is given it.
WRONG = {
    "lacks a weight": (
        tensors(lambda t, q: {n: v for n, v in t.items() if n != q}),
        r"(lack|missing|incomplete).*query|no position table", LOADERS,
    ),
    "holds none of the model's": (
        tensors(lambda t, q: {f"other.{i}": v for i, v in enumerate(t.values())}),
        "lack|missing|no position table", LOADERS,
    ),
    "of another shape": (
        tensors(lambda t, q: t | {q: t[q][:, :5].contiguous()}),
        r"query\S* must be .*shape", OURS,
    ),
    "quantised": (
        tensors(lambda t, q: t | {q: t[q].to(torch.int8)}), "int8", OURS,
    ),
    "said to be quantised": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised",
        ("convert", "load"),
    ),
    "a word for a width": (
        config(hidden_size="big"), r"none of a bert .*; take the config", ("convert",),
    ),
    "a width of 0": (
        config(hidden_size=0, embedding_size=0), "; take", ("convert",),
    ),
    "cut": (cut, "truncated or corrupted", OURS),
    "a vocabulary of 10¹²": (config(vocab_size=10**12), "vocab_size must be", OURS),
    "10⁹ layers": (config(num_hidden_layers=10**9), "num_hidden_layers must be", OURS),
    "a width of 10⁹": (config(hidden_size=10**9), "hidden_size must be", OURS),
    "a few words more": (config(vocab_size=61), "shape|two models", OURS),
    "a layer less": (
        config(num_hidden_layers=1), r"fewer layers|beyond the 1 layers|unexpected", OURS,
    ),
    "a layer more": (config(num_hidden_layers=3), r"lack|missing", OURS),
    "a shard is missing": (
        sharded(lambda folder, *_: (folder / "b.safetensors").unlink()),
        "b.safetensors: this shard of the model is missing", SHARDED,
    ),
    "a shard elsewhere": (sharded(outside), "expected shards beside it", SHARDED),
    "a tensor twice": (sharded(twice), "in another shard too", SHARDED),
    "a tensor that the index has alone": (sharded(absent), "which the index says", SHARDED),
    "a link out of the folder": (link, "a link out of the model's folder", OURS),
    "a pickle that runs code": (evil, "holds more than tensors", SHARDED),
    "code beside the model": (
        remote, r"needs code of its own, which is not run.*trust.remote.code", ("convert",),
    ),
    "a config that is none": (
        lambda folder, query: (folder / "config.json").write_text("[1]"), "JSON object|config",
        OURS,
    ),
}  # fmt: skip
CASES = [(what, loader) for what, (_, _, loaders) in WRONG.items() for loader in loaders]


@pytest.mark.unchecked
@pytest.mark.parametrize(("what", "loader"), CASES)
def test_what_is_wrong_is_said_and_nothing_written(folders, tmp_path, what, loader, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    spoil, words, _ = WRONG[what]
    base, load = LOADERS[loader]
    folder = tmp_path / "model"
    shutil.copytree(folders / base, folder)
    spoil(folder, QUERY[base])
    if (folder / "manifest.json").exists():
        # It would say so first: here is asked what the loader itself sees.
        (folder / "manifest.json").unlink()
        if base == "own" and (folder / "config.json").read_text()[0] == "{":
            tisa.transformer.saving.seal_folder(folder, "transformer", {}, ["config.json", WEIGHTS])
    start, before = time.process_time(), sorted(tmp_path.iterdir())
    answer = load(folder, tmp_path / "out")
    assert answer.exit_code == 2, (answer.output, answer.exception)
    assert time.process_time() - start < 2
    with pytest.raises(type(answer.exception), match=words):
        raise answer.exception
    assert "\n" not in str(answer.exception)
    assert {p.name for p in set(tmp_path.iterdir()) - set(before)} <= {"texts.txt"}


def spoiled(folders, tmp_path, spoil, base="stock"):
    folder = tmp_path / "model"
    shutil.copytree(folders / base, folder)
    spoil(folder, QUERY[base])
    (folder / "manifest.json").unlink(missing_ok=True)
    return folder


def test_scores_are_not_fitted_to_a_model_that_is_not_finite():
    model = original("bert")
    with torch.no_grad():
        model.get_parameter(QUERY["stock"])[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"query\.weight holds numbers .* not finite.*; take a copy"
    ):
        tisa.hf.convert(model, calibration=[[5, 6, 7, 8, 9]] * 2)


def test_a_config_that_a_disk_does_not_give_is_told_as_such(folders, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(OSError, match=r"config\.json: could not be read .*look after its disk"):
        load_stock(str(folders / "stock"))


@pytest.mark.parametrize("loader", ["convert", "load", "transformer.load", "AutoModel"])
def test_what_is_right_is_loaded(folders, tmp_path, loader):
    base, load = LOADERS[loader]
    spoil = sharded(lambda *_: None) if loader in SHARDED else None
    folder = folders / base if spoil is None else spoiled(folders, tmp_path, spoil, base)
    answer = load(folder, tmp_path / "out")
    assert answer.exit_code == 0, (answer.output, answer.exception)


@pytest.mark.parametrize(
    "name", [n if n == "bert" else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES]
)
def test_each_tensor_of_a_file_is_needed(name, tmp_path):
    model = original(name)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    head = {n for n, _ in model.named_parameters() if not n.startswith(model.base_model_prefix)}
    for left_out in whole if name != "bert" else [n for n in whole if ".layer.1." not in n]:
        fewer = {n: v for n, v in whole.items() if n != left_out}
        save_file(fewer, tmp_path / WEIGHTS, metadata={"format": "pt"})
        if head & whole.keys() == {left_out}:
            continue  # Without all of its head it is a model without a head.
        with pytest.raises(ValueError, match=left_out.rpartition(".")[0]):
            load_stock(str(tmp_path))


def test_another_precision_is_told(folders, tmp_path):
    folder = spoiled(
        folders, tmp_path, tensors(lambda t, q: {n: v.half() for n, v in t.items()})
    )  # fmt: skip
    with pytest.warns(UserWarning, match="weights are float16, and are taken as float32"):
        model, *_ = load_stock(str(folder))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    config(dtype=None, torch_dtype=None)(folder, "")
    assert load_stock(str(folder))[0].dtype == torch.float16


def test_what_is_nobodys_is_told(folders, tmp_path):
    more = tensors(lambda t, q: t | {"somebodys": torch.ones(2)})
    with pytest.warns(UserWarning, match="BertForMaskedLM has no place for somebodys .*; not read"):
        load_stock(str(spoiled(folders, tmp_path, more)))


@pytest.mark.parametrize("name", ["pipeline", "BertConfig", "PreTrainedModel", "AutoModel"])
def test_an_architecture_is_a_model_class(folders, tmp_path, name):
    folder = spoiled(folders, tmp_path, config(architectures=[name]))
    with pytest.warns(
        UserWarning, match=f"names {name}, no class of transformers for such a model"
    ):
        model, *_ = load_stock(str(folder))
    assert type(model) is transformers.BertModel
    # No pooler is in the file, and none is drawn.
    assert model.pooler is None


def test_a_new_head_is_asked_for(folders):
    cls = transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match=r"lack .*classifier.bias"):
        tisa.hf.load(str(folders / "converted"), model_class=cls)
    model = tisa.hf.load(str(folders / "converted"), model_class=cls, new_head=True)
    assert type(model).__name__ == "TisaBertForSequenceClassification"
    base = transformers.AutoModel.from_pretrained(folders / "converted")
    assert base.pooler is None


@pytest.mark.parametrize("blobs", ["models--somebody--little/blobs", "blobs/ab"])
def test_links_of_the_hubs_cache_are_its_own(folders, tmp_path, blobs):
    snapshot = tmp_path / "models--somebody--little" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    for path in (folders / "stock").iterdir():
        shutil.copy(path, tmp_path / blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(tmp_path / blobs / f"blob-of-{path.name}")
    assert load_stock(str(snapshot))[1] is not None
    named = tmp_path / "named"
    named.symlink_to(snapshot)
    assert read_checkpoint(named).config["vocab_size"] == 60
    # A folder that only looks like it in its name has no blobs.
    (tmp_path / "snapshots").mkdir()
    moved = shutil.copytree(snapshot, tmp_path / "snapshots" / "0123", symlinks=True)
    with pytest.raises(ValueError, match="a link out of the model's folder"):
        load_stock(str(moved))


def test_links_out_of_a_sentence_encoder_are_not_followed(folders, tmp_path):
    folder = spoiled(folders, tmp_path, lambda *_: None)
    listed = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "any"}]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").symlink_to(tmp_path / "secret.json")
    answer = converted(folder, tmp_path / "out")
    assert answer.exit_code == 2
    assert "1_Pooling/config.json: a link out of the model's folder" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_a_converted_model_says_what_it_was_made_from(folders, tmp_path):
    out = tmp_path / "out"
    assert converted(folders / "stock", out).exit_code == 0
    told = json.loads((out / "config.json").read_text())["tisa"]["made_from"]
    (digest,) = told["weights"].values()
    assert digest == hashlib.sha256((folders / "stock" / WEIGHTS).read_bytes()).hexdigest()
    assert digest in (out / "README.md").read_text()
    shown = command.tisa_(["verify", out])
    assert shown.exit_code == 0, shown.output
    assert f"{out}: converted model" in shown.stdout
    assert digest in shown.stdout
    content = bytearray((out / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (out / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        tisa.hf.load(str(out))
    # Calibrated on a text, it has the text's hash; another text, another hash.
    model, ids = original("bert"), [[2, 7, 8, 9, 3], [2, 9, 8, 7, 3]]
    sums = [
        tisa.hf.convert(model, init="zero", calibration=given).config.tisa["made_from"]
        for given in (ids, ids[::-1])
    ]
    assert sums[0]["tensors"] == sums[1]["tensors"]
    assert sums[0]["calibration"] != sums[1]["calibration"]


@pytest.mark.parametrize("damage", ["cut off", "not answered"])
def test_a_tokenizer_that_is_there_and_cannot_be_read_is_told(
    damage, folders, tmp_path, monkeypatch
):
    stock = shutil.copytree(folders / "stock", tmp_path / "stock")
    if damage == "cut off":
        path = stock / "tokenizer.json"
        path.write_bytes(path.read_bytes()[:100])
    else:

        def refuse(*args, **kwargs):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=r"tokenizer\.json.*could not be loaded.*take them away"):
        tisa.hf.saving.load_stock(str(stock))
