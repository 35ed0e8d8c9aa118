"""The playground's page: used in a browser, and its numbers against jaxgru's."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from equations import sigma
from random_models import by_gate

from jaxgru import lm
from jaxgru.cli.playground import PAGE
from jaxgru.lm import apply, load
from jaxgru.lm.evaluation import stream_nll, window_loss

ROOT = Path(__file__).parents[2]
PLAYGROUND = ROOT / "playground"
MODULES = PLAYGROUND / "node_modules"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "playwright-core").is_dir(),
    reason="needs Node, and `npm ci` in playground/",
)
needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).is_file(), reason=f"needs Chromium; CHROMIUM says where it is ({CHROMIUM})"
)


def node(*command: str | Path, **environment: Path | str) -> None:
    """Run Node in the playground's folder; print what it prints, and expect it to succeed."""
    done = subprocess.run(
        ["node", *command],
        cwd=PLAYGROUND,
        env=os.environ | {"CHROMIUM": CHROMIUM} | {k: str(v) for k, v in environment.items()},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The page, built as the site does."""
    folder = tmp_path_factory.mktemp("playground") / "dist"
    node(MODULES / "vite" / "bin" / "vite.js", "build", "--outDir", folder)
    return folder


def use(file: str, built: Path, report: Path) -> dict:
    """Run the tests of a file in a browser; return what they report."""
    node(
        "--test", "--test-reporter=spec", f"tests-browser/{file}",
        PLAYGROUND_DIST=built, PLAYGROUND_REPORT=report,
    )  # fmt: skip
    return json.loads(report.read_text(encoding="utf-8"))


def assert_same_means(means: dict[str, float], model: str, text: str) -> None:
    """Compare with jaxgru, by how often the state is lost. The panels show three decimals."""
    params, _, tokenizer = load(model)
    tokens = tokenizer.encode(text)
    for every, nats in means.items():
        expected = (
            stream_nll(params, tokens).mean()
            if every == "never"
            else window_loss(params, tokens, int(every))
        )
        assert nats == pytest.approx(expected, abs=6e-4), (model, every)


def assert_same_bets(bets: list[list[list[str]]], model: str, texts: list[str]) -> None:
    """Compare the bars with jaxgru's probabilities after each text, in whole percents."""
    params, _, tokenizer = load(model)
    for rows, text in zip(bets, texts, strict=True):
        logits, _ = apply(params, tokenizer.encode(text)[None])
        p = np.asarray(jax.nn.softmax(logits[0, -1]))
        expected = np.argsort(-p)[: len(rows)]
        assert [character for character, _ in rows] == list(tokenizer.decode(expected))
        assert [int(percent.removesuffix("%")) for _, percent in rows] == pytest.approx(
            100 * p[expected], abs=0.51
        )


def assert_code_resets(code: str, every: int | None, model: str) -> None:
    """Let the code that the page shows write; compare with `apply` since the last reset."""
    params, _, tokenizer = load(model)
    read = [tokenizer.encode("R")]

    def draw(logits):
        read.append(np.asarray(logits).argsort()[:, -2])  # not the likeliest: that soon repeats
        return read[-1]

    names = {"lm": lm, "params": params, "n": 11, "x": read[0], "draw": draw}
    exec(code, names)
    since = 0 if every is None else 10 - 10 % every
    expected, _ = apply(params, np.stack(read, axis=1)[:, since:11])
    np.testing.assert_allclose(names["logits"][0], expected[0, -1], atol=2e-5)


def assert_pytorch_code_resets(code: str, every: int | None) -> None:
    """Let the PyTorch code of the page write; compare with one call since the last reset."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 5)
    draw = torch.nn.Linear(5, 3)
    x = torch.randn(1, 1, 3)
    read = [x]

    def next_one(y):
        read.append(draw(y))
        return read[-1]

    names = {"gru": gru, "n": 11, "x": x, "draw": next_one}
    exec(code, names)
    since = 0 if every is None else 10 - 10 % every
    expected, _ = gru(torch.cat(read[since:11]))
    torch.testing.assert_close(names["y"], expected[-1:])


def assert_same_step(values: list[str], unit: int, text: str) -> None:
    """Compare a unit's h, r, n, z and h′ at the last character with the equations in NumPy."""
    params, _, tokenizer = load("astra_alpha")
    p = {k: np.asarray(v, np.float64) for k, v in vars(by_gate(params.layers[0])).items()}
    before = z = r = n = h = np.zeros(len(p["Un"]))
    for x in np.asarray(params.embedding, np.float64)[tokenizer.encode(text)]:
        before = h
        z, r = (sigma(x @ p["W" + g] + h @ p["U" + g] + p["b" + g] + p["c" + g]) for g in "zr")
        n = np.tanh(x @ p["Wn"] + (r * h) @ p["Un"] + p["bn"])
        h = (1 - z) * h + z * n
    shown = [float(value.replace("−", "-")) for value in values]
    assert shown == pytest.approx([v[unit] for v in (before, r, n, z, h)], abs=0.0051)


@needs_node
@needs_chromium
def test_every_panel_by_mouse_and_by_keyboard(built, tmp_path):
    report = use("quick.test.mjs", built, tmp_path / "report.json")
    params, _, tokenizer = load("astra_alpha")

    def mean_nats(text: str, first: int = 1) -> float:
        """What the first panel shows: given to the model with its state, from a character on."""
        return stream_nll(params, tokenizer.encode(text))[first - 1 :].mean()

    two_decimals = 0.0051
    for text, nats in report["written"]:
        assert nats == pytest.approx(mean_nats(text), abs=two_decimals)
    since = report["since"]
    for text, nats in zip(since["texts"], since["costs"], strict=True):
        assert nats == pytest.approx(mean_nats(text, since["from"]), abs=two_decimals)
    assert_same_means(report["means"], "astra_alpha", report["text"])
    assert_same_step(report["cell"], 100, "PROS")
    for every, codes in report["code"].items():
        reset_every = None if every == "never" else int(every)
        for code, resets in zip(codes["jax"], (None, reset_every), strict=True):
            assert_code_resets(code, resets, "astra_alpha")
        for code, resets in zip(codes["torch"], (None, reset_every), strict=True):
            assert_pytorch_code_resets(code, resets)
    assert_pytorch_code_resets(report["unnamed"], 1)
    # Of "PROSPERO:\nBe collected", before the "t": with the state, and reset every 4 characters
    assert_same_bets(report["bets"], "astra_alpha", ["PROSPERO:\nBe collec", "lec"])


@needs_node
def test_the_page_in_the_package_is_built_from_these_sources(built):
    """The same bytes, without the models and the picture of links to the site."""

    def contents(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    expected = {
        name: content
        for name, content in contents(built).items()
        if name != "preview.png" and not name.startswith("weights/")
    }
    in_package = contents(PAGE)
    remedy = "`npm run package` in playground/ makes jaxgru/cli/page anew"
    assert in_package.keys() == expected.keys(), remedy
    changed = [name for name in expected if in_package[name] != expected[name]]
    assert not changed, remedy


@needs_node
@needs_chromium
def test_the_command_opens_it_for_a_newcomer(tmp_path):
    """`jaxgru playground` has the page and the models; what it shows is what jaxgru computes."""
    command = [sys.executable, "-m", "jaxgru", "playground", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+/", server.stdout.readline())[0]
            file = "tests-browser/command.test.mjs"
            report = tmp_path / "report.json"
            node("--test", file, PLAYGROUND_ADDRESS=address, PLAYGROUND_REPORT=report)
        finally:
            server.terminate()
    shown = json.loads(report.read_text(encoding="utf-8"))
    params, _, tokenizer = load(shown["model"])
    for text, nats in zip(shown["texts"], shown["nats"], strict=True):
        assert len(text) == 2007
        assert stream_nll(params, tokenizer.encode(text)).mean() == pytest.approx(nats, abs=0.0051)


@pytest.mark.slow
@needs_node
@needs_chromium
def test_all_models_and_screens(built, tmp_path):
    report = use("slow.test.mjs", built, tmp_path / "report.json")
    assert len(report["means"]) == 3
    for model, means in report["means"].items():
        assert len(means) == 9
        assert_same_means(means, model, report["text"])


@needs_node
def test_what_the_page_computes_by_itself():
    """The URL, the state as text, lines: without a browser."""
    node(MODULES / "vitest" / "vitest.mjs", "run", "--exclude=src/engine/**")


def test_the_preview_is_where_the_page_says():
    """Others ask for the image of a link by its whole address, and in this size."""
    site = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = site["project"]["urls"]["Documentation"] + "playground/preview.png"
    assert f'property="og:image" content="{address}"' in (PLAYGROUND / "index.html").read_text()
    image = (PLAYGROUND / "public" / "preview.png").read_bytes()
    assert struct.unpack(">II", image[16:24]) == (1200, 630)
    assert len(image) < 200_000
