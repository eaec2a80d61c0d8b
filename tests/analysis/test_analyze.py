"""`tisa analyze` as a user runs it: what comes out, and what happens to what is broken."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import command
from little_models import model_of
from tisa import cli
from tisa.analysis import analyze, numbers_of
from tisa.analysis.figures import figures_of
from tisa.analysis.page import page_of
from tisa.analysis.report import folder_name, numbers_of_all, write_report


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """A folder with little models, one with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for family in ("BERT", "ALBERT", "ViT", "T5"):
        model_of(family).save_pretrained(root / family.lower())
    tokenizer(root / "bert")
    return root


def tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(36))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)


def run(*arguments):
    return command.tisa_(["analyze", *map(str, arguments)])


@pytest.fixture(scope="module")
def report(little, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "deep" / "report"
    scores = out.parent.parent / "scores.csv"
    scores.write_text("model,score\nbert,80.1\nalbert,82.3\n")
    answer = run(little / "bert", little / "albert", "--out", out, "--scores", scores, "--json")
    assert answer.exit_code == 0, answer.output
    return out, json.loads(answer.stdout)


def test_numbers_figures_and_page_are_written(report):
    out, printed = report
    numbers = json.loads((out / "numbers.json").read_text())
    assert numbers == printed
    assert [m["name"] for m in numbers["models"]] == ["bert", "albert"]
    assert numbers["models"][1]["family"] == "ALBERT"
    assert numbers["scores"] == {"bert": 80.1, "albert": 82.3}
    wanted = {
        "table", "gram", "toeplitz", "toeplitz-r2", "spectrum", "heads", "heads-raw", "offset-rows",
        "kernels", "kernel-errors", "logit-terms",
    }  # fmt: skip
    for model in ("bert", "albert"):
        for kind in ("png", "svg"):
            assert {p.stem for p in (out / "figures" / model).glob(f"*.{kind}")} == wanted
    assert {p.stem for p in (out / "figures").glob("*.png")} == {"compare-gram", "compare-scores"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["report"]


def test_the_page_stands_alone_and_holds_the_numbers(report):
    out, numbers = report
    page = (out / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "http://www.w3.org/2000/svg" in page
    assert len(re.findall("https?://", page)) == 1
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])
    for packed, plain in zip(data["models"], numbers["models"], strict=True):
        for name, part in packed["numbers"].items():
            assert part == plain[name]
    assert page.count("{{") == 0


def test_the_same_figure_is_the_same_file(little, tmp_path):
    from tisa.analysis.report import _save

    found = analyze(little / "t5")
    for name in ("first", "second"):
        _, shows, figure = next(figures_of(found))
        _save(figure, tmp_path / name, shows)
    for kind in (".png", ".svg"):
        first, second = ((tmp_path / name).with_suffix(kind) for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_text_gives_figures_of_every_layer(little):
    found = analyze(little / "bert", text=" ".join(f"w{(7 * i) % 36}" for i in range(120)))
    assert found.text.logits.shape[:2] == (2, 3)
    assert found.text.tokens == 120 + 2 * 4  # 30 words to a window, [CLS] and [SEP] around them
    names = {name for name, _, _ in figures_of(found)}
    assert {"text-layers", "text-layer-1", "text-layer-2"} <= names
    numbers = numbers_of(found)["text"]
    assert len(numbers["logits"][0][0]) == 63


def test_text_shows_the_scores_of_a_converted_model(tmp_path):
    """Content is silenced, so what attention does with distance is f(k) alone."""
    import tisa.hf

    model = model_of("BERT")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    tokens = [[1, *range(4, n), 2] for n in (12, 20, 30)]
    converted = tisa.hf.convert(
        model, positions="replace", init="zero", num_kernels=1, calibration=tokens
    )
    wanted = torch.tensor([[-3.0, 0.0, 2.0], [1.0, -1.0, 5.0]])
    with torch.no_grad():
        for layer, places in zip(converted.encoder.layer, wanted, strict=True):
            scores = layer.attention.self.offset_scores[0]
            scores.kernel_amplitudes.fill_(4.0)
            scores.kernel_sharpness.fill_(0.5)
            scores.kernel_offsets.copy_(places.unsqueeze(1))
    converted.save_pretrained(tmp_path / "converted")
    tokenizer(tmp_path / "converted")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * i) % 36}" for i in range(400)))
    answer = run(tmp_path / "converted", "--text", text, "--out", tmp_path / "report", "--json")
    assert answer.exit_code == 0, (answer.output, answer.exception)
    (found,) = json.loads(answer.stdout)["models"]
    zero = -found["text"]["offsets"][0]
    near = slice(zero - 10, zero + 11)
    logits = torch.tensor([[head[near] for head in layer] for layer in found["text"]["logits"]])
    assert (logits.argmax(-1) - 10).tolist() == wanted.tolist()
    # Heights as they were put there: a kernel's top above its foot.
    assert (logits.amax(-1) - logits.amin(-1)).sub(4.0).abs().max() < 0.2


def test_logits_on_text_are_those_of_the_first_layer(little):
    """Weights of attention lead back to q·k/√d, but for what a row has in common."""
    from transformers import AutoModel, AutoTokenizer

    from tisa.analysis.text import attention_by_offset
    from tisa.weights import read_checkpoint

    text = " ".join(f"w{(5 * i) % 36}" for i in range(14))
    found = attention_by_offset(read_checkpoint(little / "bert"), text, length=32)
    model = AutoModel.from_pretrained(little / "bert")
    ids = AutoTokenizer.from_pretrained(little / "bert")(text, return_tensors="pt")["input_ids"]
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        x = model.embeddings(ids)[0]
        q, k = (m(x).reshape(-1, 3, 8).transpose(0, 1) for m in (attention.query, attention.key))
        logits = (q @ k.mT / 8**0.5)[:, 1:-1, 1:-1]  # without [CLS] and [SEP]
        logits = logits - logits.mean(2, keepdim=True)
    centre = len(found.offsets) // 2
    for offset in (-13, -5, 0, 1, 13):
        expected = logits.diagonal(offset, 1, 2).mean(1)
        torch.testing.assert_close(
            found.logits[0, :, centre + offset], expected, atol=1e-3, rtol=1e-3
        )
    assert found.logits[:, :, centre + 14].isnan().all()


def test_longformers_windows_are_unrolled_into_a_matrix():
    from tisa.analysis.text import _unrolled

    windows = torch.arange(2 * 6 * 5.0).reshape(2, 6, 5) + 1  # two to either side
    dense = _unrolled(windows)
    assert dense.shape == (2, 6, 6)
    for query in range(6):
        for key in range(6):
            near = abs(key - query) <= 2
            expected = windows[:, query, key - query + 2] if near else torch.zeros(2)
            assert dense[:, query, key].tolist() == expected.tolist()


def test_vit_names_its_grid_and_t5_its_curves(little, tmp_path):
    found = analyze(little / "vit")
    vit = numbers_of(found)
    assert (vit["grid"]["rows"], vit["grid"]["columns"]) == (5, 5)
    assert vit["special_first"] == "[CLS]"
    assert "logit_terms" not in vit
    assert "grid" in {name for name, _, _ in figures_of(found)}
    answer = run(little / "t5", "--out", tmp_path / "out")
    assert answer.exit_code == 0, answer.output
    assert "2 learned curves" in answer.stdout
    assert (tmp_path / "out/figures/t5/learned-curve-1.png").is_file()


def test_names_that_are_the_same_get_folders_of_their_own(little):
    found = [analyze(little / "t5")] * 2
    assert [folder_name(found, i) for i in (0, 1)] == ["t5", "t5-2"]


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch ran-code",))


def broken(kind, root, little):
    """Return a model that cannot be analysed."""
    folder = root / "model"
    if kind == "missing file":
        return root / "nowhere" / "model.safetensors"
    if kind == "empty folder":
        folder.mkdir()
        return folder
    shutil.copytree(little / "bert", folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "corrupted":
        weights.write_bytes(b"\xff" * 500)
    elif kind == "truncated pickle":
        torch.save({"a": torch.randn(1000)}, folder / "pytorch_model.bin")
        weights.unlink()
        raw = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(raw[: len(raw) // 2])
    elif kind == "pickle that runs code":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Malicious()}))
    elif kind == "archive that runs code":
        weights.unlink()
        torch.save({"a": Malicious()}, folder / "pytorch_model.bin")
    elif kind == "rotary":
        config.write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
        save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, weights)
    elif kind == "unknown rotary":
        config.write_text(json.dumps({"model_type": "brandnew", "rope_parameters": {}}))
        save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, weights)
    elif kind == "no config":
        config.unlink()
    elif kind == "broken config":
        config.write_text("{")
    elif kind == "missing tensor":
        from safetensors.torch import load_file

        tensors = load_file(weights)
        del tensors["encoder.layer.1.attention.self.key.weight"]
        save_file(tensors, weights)
    elif kind in NOT_FINITE:
        from safetensors.torch import load_file

        tensors = load_file(weights)
        tensors[NOT_FINITE[kind]].view(-1)[7] = float("inf" if "infinite" in kind else "nan")
        save_file(tensors, weights)
    elif kind == "T5 with NaN":
        shutil.rmtree(folder)
        shutil.copytree(little / "t5", folder)
        from safetensors.torch import load_file

        tensors = load_file(weights)
        (table,) = [t for n, t in tensors.items() if n.startswith("enc") and "relative_attent" in n]
        table[3] = float("nan")
        save_file(tensors, weights)
    elif kind == "missing shard":
        model_of("BERT").save_pretrained(folder, max_shard_size="20KB")
        weights.unlink(missing_ok=True)
        next(folder.glob("model-00002*")).unlink()
    elif kind == "not a weight file":
        return config
    return folder


NOT_FINITE = {
    "NaN in the table": "embeddings.position_embeddings.weight",
    "NaN in words": "embeddings.word_embeddings.weight",
    "infinite keys": "encoder.layer.1.attention.self.key.weight",
}
BROKEN = {
    "missing file": "there is no such file",
    "empty folder": "model must have model.safetensors or pytorch_model.bin",
    "truncated": "truncated or corrupted",
    "corrupted": "truncated or corrupted",
    "truncated pickle": "truncated or corrupted",
    "pickle that runs code": "may want to run code",
    "archive that runs code": "may want to run code",
    "rotary": "it has rotary positions",
    "unknown rotary": "it has rotary positions",
    "no config": "expected a config.json beside the weights",
    "broken config": "not readable as JSON",
    "missing tensor": "key.weight' is missing",
    **{kind: f"'{name}' holds numbers that are not finite" for kind, name in NOT_FINITE.items()},
    "T5 with NaN": "SelfAttention.relative_attention_bias.weight' holds numbers that are not",
    "missing shard": "this shard of the model is missing",
    "not a weight file": "model must be a weight file",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_one_sentence_and_nothing_is_written(
    kind, little, tmp_path, monkeypatch, capsys
):
    model = broken(kind, tmp_path, little)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tisa", "analyze", str(model), "--out", "report"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err.strip()
    assert BROKEN[kind] in said
    assert said.splitlines()[-1].startswith("tisa: ")
    assert "Traceback" not in said
    assert not (tmp_path / "report").exists()
    assert not (tmp_path / "ran-code").exists()
    assert not list(tmp_path.glob(".report*"))


def test_a_hub_name_without_a_network_is_one_sentence(tmp_path):
    program = "from tisa.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", program, "analyze", "nobody/nothing", "--out", tmp_path / "out"],
        capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert answer.returncode == 2
    assert (
        "'nobody/nothing' is no local file or folder, and the hub did not give it" in answer.stderr
    )
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "no.txt"], "No such file"),
        (["--text", "empty.txt"], "got an empty file"),
        (["--text", "binary.txt"], "expected UTF-8 text"),
        (["--text", "short.txt"], "at least 8 tokens"),
        (["--text", "unknown.txt"], "the tokenizer does not know 100% of the text"),
        (["--scores", "wrong.csv"], "expected the columns model and score"),
        (["--scores", "word.csv"], "expected a number for 'bert'"),
        (["--scores", "nan.csv"], "expected a number for 'bert'"),
        (["--scores", "other.csv"], "'brat' in other.csv is none of the models given"),
        (["--scores", "twice.csv"], "expected one score of 'bert' in twice.csv, got two"),
        (["--scores", "one.csv"], "scores of at least two of the models in one.csv, got 1"),
        (["--out", "file"], "file is a file; name a new folder"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, said, little, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "short.txt").write_text("w1 w2")
    (tmp_path / "unknown.txt").write_text("lemon " * 20)
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    (tmp_path / "word.csv").write_text("model,score\nbert,good\n")
    (tmp_path / "nan.csv").write_text("model,score\nbert,nan\n")
    (tmp_path / "other.csv").write_text("model,score\nbert,80\nbrat,81\n")
    (tmp_path / "twice.csv").write_text(f"model,score\nbert,80\n{little / 'bert'},81\n")
    (tmp_path / "one.csv").write_text("model,score\nbert,80\n")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    if "--scores" in arguments:
        # It is said before the work, not after it.
        whole = sys.modules["tisa.analysis.whole"]
        monkeypatch.setattr(whole, "analyze", wraps(whole.analyze)(pytest.fail))
    options = arguments if "--out" in arguments else [*arguments, "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["tisa", "analyze", str(little / "bert"), *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_table_of_zeros_has_no_r2(little, tmp_path):
    """Wherever it is shown: – on the terminal and in figures, null in the numbers."""
    from safetensors.torch import load_file

    from tisa.analysis.figures import figures_of_all

    shutil.copytree(little / "bert", tmp_path / "zeros")
    file = tmp_path / "zeros" / "model.safetensors"
    tensors = load_file(file)
    tensors["embeddings.position_embeddings.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    answer = run(tmp_path / "zeros", "--out", tmp_path / "out")
    assert answer.exit_code == 0, answer.output
    (line,) = [line for line in answer.stdout.splitlines() if "zeros" in line and "/24" in line]
    assert re.fullmatch(r"zeros – 0\.\d+ – 0\.\d+ – 0/3 0/24", " ".join(line.split()))
    (numbers,) = json.loads((tmp_path / "out" / "numbers.json").read_text())["models"]
    for part in (*numbers["toeplitz"].values(), *numbers["blocks"]):
        assert part["r2"] is part["off_diagonal"] is None
        assert part["interval"] == part["off_diagonal_interval"] == [None, None]
        assert part["null"] > part["off_diagonal_null"] > 0
    assert numbers["first_layer_raw"]["r2"] == [None] * 3
    assert numbers["pca"]["step_r2"] is None
    found = [analyze(tmp_path / "zeros"), analyze(little / "bert"), analyze(little / "albert")]
    drawn = {name: figure for name, _, figure in figures_of(found[0])}
    assert drawn["gram"].axes[0].get_title("left") == "zeros: P, R² –"
    assert drawn["heads-raw"].axes[0].get_title("left").endswith("R² –")
    assert [text.get_text() for text in drawn["toeplitz-r2"].axes[0].texts] == ["–"] * 8
    # It has no place on the axis of R².
    scores = {"zeros": 1.0, "bert": 2.0, "albert": 3.0}
    compared = {name: figure for name, _, figure in figures_of_all(found, scores)}
    assert "(2 models)" in compared["compare-scores"].axes[0].get_title("left")


def test_scores_know_models_as_they_were_given(little, tmp_path, monkeypatch):
    from tisa.analysis.scores import read_scores

    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "b.safetensors").write_text("")
    (tmp_path / "more" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    file = Path("scores.csv")
    file.write_text("model,score\nmodels/a/,1\nmodels/b.safetensors ,2\nbert-base-uncased,3\n")
    models = ["models/a", "models/b.safetensors", "bert-base-uncased"]
    assert read_scores(file, models) == {"a": 1.0, "b": 2.0, "bert-base-uncased": 3.0}
    with pytest.raises(ValueError, match="two of the models are called 'a'"):
        read_scores(file, [*models, "more/a"])


@pytest.mark.parametrize("equal", ["scores", "tables"])
def test_models_that_do_not_differ_have_no_correlation_but_a_report(equal, little):
    from tisa.analysis.figures import figures_of_all

    found = [analyze(little / "bert")]
    found.append(replace(found[0], name="other"))
    scores = {"bert": 80.0, "other": 80.0 if equal == "scores" else 81.0}
    if equal == "scores":
        measured = replace(found[0].invariance["table"], r2=0.5)
        found[1] = replace(found[1], invariance=found[1].invariance | {"table": measured})
    drawn = {name: figure for name, _, figure in figures_of_all(found, scores)}
    (ax,) = drawn["compare-scores"].axes
    assert "Correlation not defined" in ax.get_title("left")


def test_a_failure_while_writing_leaves_nothing(little, tmp_path, monkeypatch):
    from tisa.analysis import figures

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(figures, "figures_of_all", fails)
    answer = run(little / "t5", "--out", tmp_path / "out")
    assert isinstance(answer.exception, OSError)
    assert list(tmp_path.iterdir()) == []


def test_the_loader_alone_needs_no_network_and_no_transformers():
    program = (
        "import sys\n"
        "for name in ('transformers', 'huggingface_hub', 'matplotlib'): sys.modules[name] = None\n"
        "from tisa.analysis import analyze\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert answer.returncode == 0, answer.stderr


def test_a_report_gives_way_to_a_newer_one_and_never_takes_the_place_of_others(little, tmp_path):
    out = tmp_path / "out"
    found = [analyze(little / "t5")]
    first = write_report(found, out)
    (out / "figures" / "of-an-older-version.png").touch()
    assert write_report(found, out) == first
    (out / "thesis.tex").write_text("years of work")
    answer = run(little / "t5", "--out", out)
    assert isinstance(answer.exception, ValueError)
    assert "out must be a new folder or one with a report in it" in str(answer.exception)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert sorted([*first, out / "thesis.tex"]) == sorted(p for p in out.rglob("*") if p.is_file())


def test_a_models_name_cannot_run_script(little):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    found = [replace(analyze(little / "t5"), name=hostile)]
    page = page_of(found, numbers_of_all(found, settings={"text": hostile}))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
