"""`jaxgru convert`: from any format to the others, and one sentence where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from random_models import random_params, same_bits

import jaxgru
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import DataConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats.pth import load_pth, load_pth_model
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.load import find_model
from jaxgru.lm.runs.checkpoints import open_checkpoints, save
from jaxgru.lm.runs.folders import RunInfo, create_run
from jaxgru.lm.training import Progress, init_state

torch = pytest.importorskip("torch")

MODEL = ModelConfig(
    "gru", 9, 3, 4, num_layers=2, second_bias=True, reset_gate="before", init_scheme="pytorch"
)
TOKENIZER = CharacterTokenizer("ROME: abc")


@pytest.fixture
def saved(tmp_path) -> Path:
    """A small model, m.safetensors, in the folder that the script runs in."""
    path = tmp_path / "m.safetensors"
    save_safetensors(path, random_params(MODEL), Config("my_model", MODEL), TOKENIZER)
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with one checkpoint, of a model that was never trained."""
    config = Config("my_run", MODEL, DataConfig("./mine.txt"))
    folder = create_run(tmp_path / "runs", config, TOKENIZER, RunInfo("12ab"))
    state = init_state(config.model, config.training).replace(params=random_params(MODEL))
    with open_checkpoints(folder) as manager:
        save(manager, state, None, Progress())
    return folder


@pytest.mark.parametrize("suffix", [".pth", ".onnx"])
def test_there_and_back(suffix, script, saved, tmp_path):
    there = script("convert", "m.safetensors", f"m{suffix}")
    assert (there.code, there.out, there.err) == (0, f"my_model written to m{suffix}\n", "")
    if suffix == ".pth":  # which holds no tokenizer
        params, config, tokenizer = load_pth(tmp_path / "m.pth", TOKENIZER)
    else:
        back = script("convert", f"m{suffix}", "n.safetensors")
        assert (back.code, back.err) == (0, "")
        params, config, tokenizer = jaxgru.lm.load(tmp_path / "n.safetensors")
    assert same_bits(params, random_params(MODEL))
    assert config == Config("my_model", MODEL)
    assert tokenizer.vocabulary == TOKENIZER.vocabulary


def test_a_run(script, run, tmp_path):
    """To each format. Then it is sampled."""
    params = random_params(MODEL)
    assert script("convert", run, "run.safetensors").code == 0
    again, config, tokenizer = jaxgru.lm.load(tmp_path / "run.safetensors")
    assert same_bits(again, params)
    assert script("convert", run, "last.onnx", "--epoch", "last").code == 0
    assert same_bits(jaxgru.lm.load(tmp_path / "last.onnx")[0], params)
    refused = script("convert", run, "best.onnx", "--epoch", "best")  # as none is finished
    assert refused.code == 2 and "epoch" in refused.err
    assert config == Config("my_run", MODEL, DataConfig("./mine.txt"))
    assert find_model(tmp_path / "run.safetensors").text_sha256() == "12ab"
    assert tokenizer.vocabulary == TOKENIZER.vocabulary

    assert script("convert", run.parent, "run.pth").code == 0
    assert same_bits(load_pth_model(tmp_path / "run.pth")[0], params)

    outcome = script("sample", "run.safetensors", "--num-tokens", 5, "--prompt", "ROME")
    assert outcome.code == 0 and "ROME" in outcome.out


def test_a_model_that_ships(script, shakespeare, tmp_path, monkeypatch):
    """Its .pth is sampled as it is, with the tokenizer that a conversion takes by default."""
    (tmp_path / "text").write_text(shakespeare)
    monkeypatch.setenv("JAXGRU_CORPUS", str(tmp_path / "text"))
    assert script("convert", "astra_alpha", "a.pth").code == 0
    options = ["--num-tokens", 30, "--temperature", 0]
    there = script("sample", "astra_alpha", *options)
    here = script("sample", "a.pth", *options)
    assert (here.code, here.err, here.out) == (0, "", there.out)
    assert script("convert", "a.pth", "b.safetensors").code == 0
    params, config, tokenizer = jaxgru.lm.load("b.safetensors")
    their_params, their_config, their_tokenizer = jaxgru.lm.load("astra_alpha")
    assert same_bits(params, their_params) and config.model == their_config.model
    assert config.training.epochs == 10
    assert tokenizer.vocabulary == their_tokenizer.vocabulary


def test_a_pth_whose_tokenizer_is_not_known(script, saved):
    """One sentence that says what is missing and how to give it."""
    assert script("convert", "m.safetensors", "m.pth").code == 0
    outcome = script("sample", "m.pth")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "m.pth holds no tokenizer, and none is known for 9 tokens" in outcome.err
    assert "jaxgru.lm.formats.pth.load_pth('m.pth', tokenizer)" in outcome.err


@pytest.mark.parametrize("way", [os.symlink, os.link])
def test_a_model_is_never_written_over_itself(script, saved, tmp_path, way):
    """A .pth holds no tokenizer and no recipe, so they would be lost."""
    before = saved.read_bytes()
    way(saved, tmp_path / "m.pth")
    outcome = script("convert", "m.safetensors", "m.pth", "--force")
    assert outcome.code == 2 and "m.pth is the same file as m.safetensors" in outcome.err
    assert saved.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["m.safetensors"], "OUT"),
        (["nowhere.pth", "x.safetensors"], "there is no file nowhere.pth"),
        (["astra", "x.pth"], "there is no model 'astra'; the nearest is astra_beta"),
        (["notes.txt", "x.safetensors"], "notes.txt is neither a run's folder nor"),
        (["folder.pth", "x.safetensors"], "there is no run in folder.pth"),
        (["m.safetensors", "x.h5"], "x.h5 must end in .safetensors, .onnx or .pth"),
        (["m.safetensors", "x.safetensors"], "m.safetensors is already a .safetensors file"),
        (["m.safetensors", "folder.pth", "--force"], "folder.pth cannot be written: Is a dir"),
        (["m.safetensors", "none/x.pth"], "none/x.pth cannot be written: No such file"),
        (["m.pth", "x.safetensors"], "m.pth cannot be used: it is damaged"),
        (["m.safetensors", "x.pth", "--epoch", "best"], "only a run has a best epoch"),
        (["rnn.safetensors", "x.pth"], "x.pth cannot be written: the study has only GRUs"),
    ],
)
def test_refused(arguments, says, script, saved, tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "m.pth").write_bytes(b"none")
    rnn = ModelConfig("rnn", 9, 3, 4)
    save_safetensors(tmp_path / "rnn.safetensors", random_params(rnn), Config("x", rnn), TOKENIZER)
    before = sorted(os.listdir(tmp_path))
    outcome = script("convert", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert says in outcome.err and outcome.err.count("\n") == 1
    assert outcome.err.startswith("jaxgru convert: ")
    assert sorted(os.listdir(tmp_path)) == before
