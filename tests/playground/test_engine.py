"""The playground's engine against jaxgru, and its own tests; Node runs them."""

import dataclasses
import json
import os
import shutil
import string
import subprocess
from pathlib import Path

import fixtures
import numpy as np
import pytest
from random_models import random_params

from jaxgru.lm import load, load_config
from jaxgru.lm.data.corpus import split
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import FOLDER
from maintain import playground

PLAYGROUND = Path(__file__).parents[2] / "playground"
VITEST = PLAYGROUND / "node_modules" / "vitest" / "vitest.mjs"

node = pytest.mark.skipif(
    shutil.which("node") is None or not VITEST.is_file(),
    reason="needs Node, and `npm ci` in playground/",
)

COMPARED = {
    "logits, SIMD true",
    "logits, SIMD false",
    "nats, and their means",
    "states",
    "reach",
    "greedy text is the same",
}
NUMBERS = {
    "numbers the distribution that is drawn from",
    "numbers random numbers",
    "numbers numbers of 16 bits",
}

# Nothing is a multiple of 16, which the engine's product handles at once.
RANDOM = {
    "before": {"vocab_size": 3, "embedding_dim": 5, "hidden_dim": 9, "num_layers": 3,
               "reset_gate": "before"},
    "after": {"vocab_size": 18, "embedding_dim": 1, "hidden_dim": 19},
    "smallest": {"cell": "rnn", "vocab_size": 2, "embedding_dim": 1, "hidden_dim": 1,
                 "num_layers": 2},
    "tied": {"vocab_size": 18, "embedding_dim": 19, "hidden_dim": 19, "tied_embedding": True},
}  # fmt: skip


def run(*arguments: str, folder: Path) -> dict[str, str]:
    """Run vitest; return the status of each test."""
    report = folder / "report.json"
    done = subprocess.run(
        ["node", VITEST, "run", *arguments, "--reporter=default", "--reporter=json",
         f"--outputFile={report}"],
        cwd=PLAYGROUND, env=os.environ | {"PLAYGROUND_FIXTURES": str(folder)},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert report.is_file()
    files = json.loads(report.read_text(encoding="utf-8"))["testResults"]
    assert all(file["status"] == "passed" for file in files)
    return {test["fullName"]: test["status"] for file in files for test in file["assertionResults"]}


def assert_compared(statuses: dict[str, str], models: list[str]) -> None:
    names = NUMBERS | {f"{m}.fixture.safetensors {test}" for m in models for test in COMPARED}
    assert {name: statuses.get(name) for name in names} == dict.fromkeys(names, "passed")


def random_model(folder: Path, name: str, **options: int | str) -> Path:
    config = load_config("elman_alpha" if options.get("cell") == "rnn" else "astra_alpha")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **options))
    params = random_params(config.model, seed=3, scale=1 / 4)  # rounding errors must die out
    path = folder / f"{name}.safetensors"
    vocabulary = CharacterTokenizer(string.printable[: config.model.vocab_size])
    save_safetensors(path, params, config, vocabulary)
    return path


def write_fixtures(folder: Path, names: list[str], text: str, N: int, **options) -> None:
    for name in names:
        tokens = split(load(name)[2].encode(text), 0.1)[1][:N]
        fixtures.write_fixture(folder, FOLDER / f"{name}.safetensors", tokens, **options)


@node
def test_the_engine(shakespeare, tmp_path):
    names = ["astra_alpha", "elman_alpha"]
    write_fixtures(tmp_path, names, shakespeare, 2000, resets=(1, 7, None))
    for name, options in RANDOM.items():
        path = random_model(tmp_path, name, **options)
        tokens = np.random.default_rng(2).integers(options["vocab_size"], size=160, dtype=np.int32)
        fixtures.write_fixture(tmp_path, path, tokens, resets=(7, None))
    fixtures.write_numbers(tmp_path)
    statuses = run("src/engine", folder=tmp_path)
    assert_compared(statuses, [*names, *RANDOM])
    compared = len(COMPARED) * len([*names, *RANDOM]) + len(NUMBERS)
    assert len(statuses) > compared + 50  # the engine's own tests


@node
@pytest.mark.slow
@pytest.mark.parametrize("name", playground.MODELS)
def test_the_engine_on_ten_thousand_characters(name, shakespeare, tmp_path):
    write_fixtures(tmp_path, [name], shakespeare, 10_000)
    fixtures.write_numbers(tmp_path)
    assert_compared(run("src/engine/parity.test.ts", folder=tmp_path), [name])


# --- The assets


@pytest.fixture
def dataset(shakespeare, tmp_path, monkeypatch):
    """The dataset of the models."""
    (tmp_path / "shakespeare.txt").write_text(shakespeare, newline="")
    monkeypatch.setenv("JAXGRU_CORPUS", str(tmp_path / "shakespeare.txt"))
    _, config, tokenizer = load("astra_alpha")
    return playground.load_dataset(config, tokenizer)[1]


def asset(name):
    return json.loads((playground.ASSETS / name).read_text(encoding="utf-8"))


def test_the_bigrams_are_those_of_the_training_text(dataset):
    table = np.array(asset("bigram.json")["nats"])
    tokens = dataset.validation
    bigrams = playground.count_bigrams(dataset)
    # 4 decimals: half of the last one, and the table's own rounding
    np.testing.assert_allclose(
        table[tokens[:-1], tokens[1:]], bigrams.token_nll(tokens), atol=5.1e-5
    )
    assert table.tolist() == playground.bigram_nats(bigrams)


@pytest.mark.slow
def test_the_units_are_those_of_the_models(dataset):
    ours = asset("units.json")["models"]
    again = playground.all_units(dataset)
    for name in playground.MODELS:
        assert [u["follows"] for u in ours[name]] == [u["follows"] for u in again[name]]
        for a, b in zip(ours[name], again[name], strict=True):
            assert abs(a["correlation"]) == pytest.approx(abs(b["correlation"]), abs=2e-3)
