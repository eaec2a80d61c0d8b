"""`tisa-lab demo`, whole and tiny: the page has the JSON's numbers, interruptions cost nothing."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import command
from tisa_lab import cli
from tisa_lab.demo import comparing, replacing, story
from tisa_lab.demo.measuring import recognised
from tisa_lab.demo.parts import Parts
from tisa_lab.demo.settings import Settings, quick

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
CHAPTERS = list(story.CHAPTERS)


def told(out, *, settings=None, **more):
    """The demo without a network: a small model, trained for some steps."""
    cache = out.parent / "cache"
    return story.tell(out, settings or quick(), cache=cache, offline=True, **more)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "out"
    told(folder)
    return folder


@pytest.fixture(scope="module")
def demo(out):
    return json.loads((out / "demo.json").read_text())


class Page(HTMLParser):
    """Collects a page's numbers by their keys, its pictures, its sections and what it asks for."""

    def __init__(self, text):
        super().__init__()
        self.numbers, self.images, self.sections, self.asked = [], [], {}, []
        self.key = self.section = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.key = given.get("data-key")
        self.asked += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag == "section":
            self.section = given["id"]
            self.sections[self.section] = []
        if tag == "img":
            self.images.append((given["alt"], given["src"]))
        if self.section:
            self.sections[self.section].append(tag)

    def handle_data(self, text):
        if self.key is not None:
            self.numbers.append((self.key, text))
            self.key = None


def looked_up(demo, key):
    for part in key.split("."):
        demo = demo[int(part)] if isinstance(demo, list) else demo[part]
    return demo


def check_numbers(shown, demo):
    """Every number on the page is the JSON's, to the last digit that is shown."""
    for key, text in shown:
        value = looked_up(demo, key)
        value = len(value) if isinstance(value, list) else value
        if isinstance(value, str):
            assert text == value, key
        elif value is None:
            assert text == "–", key
        else:
            (digits,) = re.findall(r"^([−\d.,]+)(?: %| s)?$", text)
            digits = digits.replace("−", "-").replace(",", "")
            places = len(digits.partition(".")[2])
            scale = 100 if text.endswith("%") else 1
            assert float(digits) == pytest.approx(scale * value, abs=0.5001 * 10**-places), key


def test_the_page_shows_the_numbers_of_the_json(out, demo):
    page = Page((out / "index.html").read_text())
    check_numbers(page.numbers, demo)
    keys = {key for key, _ in page.numbers}
    assert len(keys) > 60
    for chapter in CHAPTERS:
        assert any(key.startswith(f"{chapter}.") for key in keys), chapter
    # The check itself: one digit changed is seen.
    key, text = next((k, t) for k, t in page.numbers if k == "positions.r2")
    with pytest.raises(AssertionError):
        check_numbers([(key, text[:-1] + str((int(text[-1]) + 1) % 10))], demo)


def test_the_page_is_whole_and_asks_for_nothing(out, demo):
    text = (out / "index.html").read_text()
    page = Page(text)
    assert list(page.sections) == CHAPTERS
    assert "{{" not in text
    assert all(asked.startswith(("#", "data:image/png;base64,")) for asked in page.asked)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert len(page.images) == 3
    for name, source in page.images:
        picture = base64.b64decode(source.partition(",")[2])
        assert picture.startswith(b"\x89PNG"), name
        assert len(picture) > 500, name
    assert page.sections["curves"].count("button") == demo["curves"]["count"] == 8
    assert len(re.findall(r'data-chart="(?:find|reverse)"', text)) == 1
    assert page.sections["table1"].count("tr") == 1 + len(demo["table1"]["rows"])
    assert "No pretrained model could be had" in text
    assert "Made with --quick" in text


def test_without_positions_no_word_order_is_seen(demo):
    for left in ("zeroed", "mean"):
        assert demo["removed"][left]["orders"] == 0.25
        assert demo["removed"][left]["pairs"] == 0.5
        assert min(demo["removed"][left]["alike"]) > 0.99999
        assert demo["removed"][left]["closeness"] < 0.9999
    assert demo["removed"]["original"]["orders"] == demo["removed"]["original"]["pairs"] == 1
    assert demo["removed"]["original"]["closeness"] == pytest.approx(1)
    assert demo["model"]["kind"] == "small"
    assert demo["model"]["why"].startswith("offline, and ")


def test_a_vector_is_recognised_by_the_nearest_of_its_group():
    theirs = torch.eye(4).expand(3, 4, 4)
    assert recognised(theirs, theirs) == 1
    assert recognised(theirs.roll(1, 1), theirs) == 0
    ours = theirs.clone()
    ours[0, :2] = theirs[0, [1, 0]]  # in one group of three, two of four are exchanged
    assert recognised(ours, theirs) == pytest.approx(10 / 12)
    # All alike, up to the rounding of sums: chance, wherever the nearest happens to lie.
    blind = torch.ones(3, 4, 4) + 1e-6 * torch.rand(3, 4, 4)
    assert recognised(blind, theirs) == 0.25


def test_an_interrupted_demo_goes_on_where_it_stopped(out, demo, tmp_path, monkeypatch):
    again = tmp_path / "out"
    shutil.copytree(out, again)
    for name in ("distilled", "curves", "table1", "race"):
        (again / "parts" / f"{name}.json").unlink()
    for name in ("index.html", "demo.json"):
        (again / name).unlink()
    asked = []

    def interrupted(*_):
        raise KeyboardInterrupt

    def begun(chapter):
        if chapter.found is None and chapter.share == 0.0:
            asked.append(chapter.chapter)

    with monkeypatch.context() as patched:
        patched.setattr(comparing, "criteria", interrupted)
        with pytest.raises(KeyboardInterrupt):
            told(again, progress=begun)
    assert "distilled" in asked
    assert not (again / "index.html").exists()
    asked.clear()
    # Kernels come from what was kept: nothing is fitted or trained a second time.
    monkeypatch.setattr(replacing.Replacing, "fit", interrupted)
    monkeypatch.setattr(replacing.Replacing, "distil", interrupted)
    found = told(again, progress=begun)
    assert [name for name in dict.fromkeys(asked) if name != "model"] == ["table1", "race"]
    for chapter in ("removed", "kernels", "distilled", "curves", "table1"):
        assert found[chapter] == demo[chapter], chapter
    assert not found["begun_anew"]
    assert (again / "index.html").is_file()


@pytest.mark.parametrize("change", ["seed", "fresh", "nothing"])
def test_other_settings_are_not_mixed_with_old_chapters(out, tmp_path, monkeypatch, change):
    again = tmp_path / "out"
    shutil.copytree(out, again)

    def stop(*_, **__):
        raise RuntimeError("began")

    monkeypatch.setattr(replacing.Replacing, "__init__", stop)
    monkeypatch.setattr("tisa_lab.demo.small_model._key", lambda settings: json.loads(
        (again / "small-model" / "made_with.json").read_text()))  # fmt: skip
    if change == "nothing":
        assert told(again)["begun_anew"] is False
        return
    settings = quick(seed=1) if change == "seed" else quick()
    with pytest.raises(RuntimeError, match="began"):
        told(again, settings=settings, fresh=change == "fresh")
    assert [p.name for p in (again / "parts").iterdir()] == ["made_with.json"]


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "out" / "parts").mkdir(parents=True)
    (tmp_path / "out" / "parts" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="did not write"):
        Parts(tmp_path / "out" / "parts", {}, fresh=True)
    assert (tmp_path / "out" / "parts" / "thesis.tex").exists()


def run(*words):
    return command.lab(["demo", *map(str, words)])


def test_the_command_says_where_the_page_is_and_opens_it_only_when_told(out, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    words = ("--out", out, "--quick", "--offline", "--cache-dir", out.parent / "nothing")
    monkeypatch.setattr(story, "tell", lambda *_, **__: {"seconds": 1})
    said = run(*words)
    assert said.exit_code == 0, said.output
    assert str(out / "index.html") in said.stdout
    assert opened == []
    assert run(*words, "--no-open").exit_code == 0
    assert opened == []
    assert run(*words, "--open").exit_code == 0
    assert opened == [(out / "index.html").as_uri()]
    assert json.loads(run(*words, "--json").stdout) == {"seconds": 1}


def test_a_dry_run_writes_nothing(tmp_path):
    said = run("--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--dry-run")
    assert said.exit_code == 0, said.output
    assert "all-MiniLM-L6-v2, 84 MB" in said.stdout
    assert "index.html" in said.stdout
    said = run("--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--dry-run", "--json")
    plan = json.loads(said.stdout)
    assert "all-MiniLM-L6-v2, 84 MB" in plan["model"]
    assert (plan["finished"], plan["out"]) == ([], str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "nowhere"], "--model: expected a folder with a Hugging Face model"),
        (
            ["--device", "toaster"],
            "--device must be one that this machine has, such as cpu, got 'toaster'",
        ),
        (["--out", "a-file"], "a-file is a file; name a new folder"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    monkeypatch.setattr(sys, "argv", ["tisa", "demo", "--offline", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert expected in " ".join(said.split())
    assert "Traceback" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["a-file"]


def test_a_table_of_zeros_has_no_r2(tmp_path):
    from transformers import BertConfig, BertModel

    from tisa_lab.cli.demo import _found
    from tisa_lab.demo.looking import look
    from tisa_lab.demo.page import _verdict

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel(BertConfig(**sizes, vocab_size=4, max_position_embeddings=16))
    torch.nn.init.zeros_(model.embeddings.position_embeddings.weight)
    model.save_pretrained(tmp_path)
    found = json.loads(json.dumps(look(tmp_path), allow_nan=False))
    assert found["r2"] is found["off_diagonal"] is None
    assert "explains – of P, – off its diagonal" in _found("positions", {"positions": found})
    assert "no variance" in _verdict(found)


def test_a_truncated_model_is_one_sentence(tmp_path, monkeypatch, capsys):
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(BertConfig(**sizes, vocab_size=4)).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    made.save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tisa", "demo", "--offline", "--quick", "--model", "model"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "model.safetensors: not a readable weight file, it is truncated or corrupted" in said
    assert "Traceback" not in said


def test_ctrl_c_says_that_chapters_are_kept(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "tell", interrupted)
    monkeypatch.setattr(sys, "argv", ["tisa", "demo", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130
    assert "goes on from there" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_the_page_in_a_browser(out, demo):
    """No errors, nothing asked of the network, all drawn, in light and dark, wide and narrow."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, scheme in ((1200, "light"), (390, "dark")):
            wrong = []
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda m, w=wrong: w.append(m.text))
            page.on("pageerror", lambda e, w=wrong: w.append(str(e)))
            page.on(
                "request",
                lambda r, w=wrong: (
                    w.append(r.url) if not r.url.startswith(("file:", "data:")) else None
                ),
            )
            page.goto((out / "index.html").as_uri())
            shown = page.evaluate(
                "[...document.querySelectorAll('[data-key]')]"
                ".map(e => [e.dataset.key, e.innerText])"
            )
            assert len(shown) > 80
            check_numbers(shown, demo)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            sizes = page.evaluate("[...document.images].map(i => i.naturalWidth)")
            assert len(sizes) == 3
            assert min(sizes) >= 48
            unnamed = "svg:not([aria-label]):not([aria-hidden])"
            assert page.locator(unnamed).count() == 0
            assert page.locator("#race svg").count() == 1
            assert page.locator(".moving.live .state").count() == 1
            page.locator(".moving input").press("End")
            away = demo["curves"]["phrase"]["words"][-1]
            assert page.locator(".moving .text").inner_text().endswith(f"the man {away}")
            curve = page.locator("#large .curve").get_attribute("d")
            page.locator('.head[aria-pressed="false"]').first.click()
            page.locator("#words button").nth(2).click()
            assert page.locator("#large .curve").get_attribute("d") != curve
            assert page.locator('.head[aria-pressed="true"]').count() == 1
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(16, 19, 24)") == (scheme == "dark")
            assert wrong == []
            page.close()
        browser.close()


def test_the_record_is_of_a_whole_demo_about_a_real_model():
    record = json.loads((ROOT / "docs/records/2026-11-15-demo.json").read_text())
    assert record["model"]["kind"] == "wheel"
    assert not record["settings"]["quick"]
    assert list(record["seconds"]) == CHAPTERS
    assert record["about"]["seconds"] < 600
    asked = {key: value for key, value in record["settings"].items() if key != "seed"}
    now = json.loads(json.dumps(Settings().__dict__))
    assert asked == {key: value for key, value in now.items() if key != "seed"}
    page = (ROOT / "docs/demo.md").read_text()
    for chapter, seconds in record["seconds"].items():
        assert f"| {chapter} | {seconds:.0f} s |" in page
    removed = record["removed"]
    for found in (removed["zeroed"], removed["mean"], record["kernels"], record["distilled"]):
        cells = f"| {found['closeness']:.3f} | {100 * found['orders']:.1f} % |"
        assert f"{cells} {100 * found['pairs']:.1f} % |" in page


@pytest.mark.full
def test_the_whole_demo_without_a_network(tmp_path):
    """As a user runs it, at its full size, about the small model; within ten minutes."""
    clean = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
    done = subprocess.run(
        [sys.executable, "-m", "tisa_lab.cli", *"demo --offline --cache-dir c --out d".split()],  # noqa: SIM905
        capture_output=True, text=True, cwd=tmp_path, timeout=900,
        env=clean | {"PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "d" / "demo.json").read_text())
    check_numbers(Page((tmp_path / "d" / "index.html").read_text()).numbers, found)
    assert found["about"]["seconds"] < 600
    assert found["table1"]["of"] == 54
    assert found["distilled"]["closeness"] > found["removed"]["zeroed"]["closeness"]
    assert found["distilled"]["orders"] > 0.3
