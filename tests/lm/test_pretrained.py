"""The models that ship: their cards say the truth, and `maintain/release.py` puts them there."""

import dataclasses
import re
import sys

import chex
import pytest
from conftest import Outcome, slow

import jaxgru
from jaxgru.errors import MissingPackage
from jaxgru.lm import load, pretrained
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.load import find_model
from jaxgru.lm.pretrained import FOLDER, LARGE_MODELS, measured_losses, pretrained_names
from pages import measurements
from pages.markdown import DOCS
from study.study_records import Study, load_published

BASELINES = ["bengio_mlp", "elman_alpha", "best_gru"]  # not published, so without a published count


SMALL = ["astra_alpha", "astra_beta", "bengio_mlp", "elman_alpha"]
LARGE = ["astra_gamma", "best_gru", "scribe_alpha"]
NAMES = ["astra_alpha", *slow(*(name for name in pretrained_names() if name != "astra_alpha"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_what_is_measured_again(name):
    """The published model, trained on the canonical corpus, with the loss that the card gives."""
    params, config, tokenizer = jaxgru.lm.load(name)
    published = jaxgru.lm.load_config(name)
    assert config.model == published.model
    assert jaxgru.lm.num_params(params) == load_published(name).num_params or name in BASELINES
    _, dataset = load_dataset(config, tokenizer)  # checks the corpus's hash
    card = card_of(name)
    assert dataset.sha256 == find_model(name).text_sha256()
    assert dataset.sha256 in card and f"--training.seed {config.training.seed}`" in card
    window, stated = re.search(r"within windows of (\d+) \| ([\d.]+)", card).groups()
    loss = window_loss(params, dataset.validation, int(window))
    assert loss == pytest.approx(float(stated), abs=6e-5)
    reset = float(re.search(r"before every token \| ([\d.]+)", card)[1])
    assert window_loss(params, dataset.validation, 1) == pytest.approx(reset, abs=6e-5)


def card_of(name):
    return find_model(name).path.with_suffix(".md").read_text()


def test_what_ships_and_what_a_checkout_has_beside_it():
    """By size: those in the package are what each user of a layer downloads."""
    for folder, names, most_bytes in ((FOLDER, SMALL, 3e6), (LARGE_MODELS, LARGE, 2e7)):
        files = sorted(folder.glob("*.safetensors"))
        assert [path.stem for path in files] == names
        assert all(path.stat().st_size <= most_bytes for path in files)
    assert pretrained_names() == sorted(SMALL + LARGE) == sorted(measured_losses())


class TestWithoutTheLargeModels:
    SAYS = "{} is in the package jaxgru-models, which is not installed; {}.".format
    HOW = "run pip install ./models in a checkout of jaxgru"

    @pytest.fixture(autouse=True)
    def absent(self, monkeypatch, tmp_path):
        """As where the wheel alone is installed."""
        monkeypatch.setattr(pretrained, "LARGE_MODELS", tmp_path / "models")
        monkeypatch.setitem(sys.modules, "jaxgru_models", None)

    @pytest.mark.parametrize("name", LARGE)
    def test_a_sentence_says_what_installs_them(self, name):
        with pytest.raises(MissingPackage) as raised:
            load(name)
        assert str(raised.value) == self.SAYS(name, self.HOW)
        assert pretrained_names() == SMALL

    @pytest.mark.parametrize("words", [
        "sample best_gru", "sample best_gru --compare", "evaluate best_gru",
        "convert best_gru best_gru.onnx", "train astra_alpha --init best_gru",
    ])  # fmt: skip
    def test_so_does_each_command(self, script, words):
        done = script(*words.split())
        command = words.partition(" ")[0]
        assert done == Outcome(2, "", f"jaxgru {command}: {self.SAYS('best_gru', self.HOW)}\n")

    def test_the_list_has_their_losses_all_the_same(self, script):
        done = script("models")
        assert "best_gru      2,113,761   1.39   2.54" in done.out
        end = f"For the trained astra_gamma, best_gru, scribe_alpha,\n{self.HOW}.\n"
        assert done.out.endswith(end)

    def test_a_misspelled_one_is_still_suggested(self):
        with pytest.raises(jaxgru.UserError, match="the nearest is best_gru"):
            load("best_gur")


@pytest.mark.parametrize(
    "name, says",
    [
        ("mine", "it must be a run's folder, .* file, or a pretrained model: astra_alpha, astra_b"),
        ("astra_bta", "the nearest is astra_beta."),
        ("leviathan", "it is a config, which jaxgru train leviathan trains."),
    ],
)
def test_an_unknown_name(name, says):
    with pytest.raises(jaxgru.UserError, match=f"there is no model '{name}'; {says}"):
        load(name)


def test_the_losses_that_the_command_lists_are_the_records_ones():
    """Per character, as the study's page gives them; of seed 0, whose models ship."""
    runs = measurements.load(DOCS / "study.json", Study).runs
    ours = [run for run in runs if run.seed == 0 and not run.changes]
    shipped = [run for run in ours if run.config in pretrained_names()]
    assert len(shipped) >= 6
    for run in shipped:
        losses = measured_losses()[run.config]
        record = {name: run.measured.per_character(getattr(run.measured, name)) for name in losses}
        assert losses == pytest.approx(record, abs=6e-5)
        card = card_of(run.config)
        assert re.findall(r"^\| state .*? \| .*? \| (.*?) \|", card, re.M) == [
            f"{losses[name]:.4f}" for name in ("windows", "stream", "stateless")
        ]


def test_sample_speaks_at_once(script):
    """Without its state, the study's words: the the the."""
    options = ["--temperature", 0, "--num-tokens", 40, "--stateless"]
    done = script("sample", "astra_alpha", *options)
    assert (done.code, done.out) == (0, "ROMEO: " + "the " * 10 + "\n")


def test_release_keeps_every_bit_and_overwrites_nothing(script, tiny_run, tmp_path):
    done = script("maintain/release", tiny_run, "--folder", tmp_path)
    assert done.code == 0, done.err
    released, released_config, _ = jaxgru.lm.load(tmp_path / "astra_alpha.safetensors")
    params, config, _ = jaxgru.lm.load(tiny_run)
    chex.assert_trees_all_equal(released, params)
    data = dataclasses.replace(config.data, corpus="./tiny.txt")  # no folder of its author
    assert released_config == dataclasses.replace(config, data=data)
    before = (tmp_path / "astra_alpha.safetensors").read_bytes()
    assert measured_losses(tmp_path)["astra_alpha"]["windows"] == pytest.approx(3.34, abs=0.05)
    again = script("maintain/release", tiny_run, "--folder", tmp_path)
    assert again.code == 2 and "exists; to replace it" in again.err
    assert (tmp_path / "astra_alpha.safetensors").read_bytes() == before


def test_a_run_that_is_not_finished_is_not_released(script, run_copy, tmp_path):
    (run_copy / "samples.txt").unlink()
    done = script("maintain/release", run_copy, "--folder", tmp_path / "models")
    assert done.code == 2 and "is not finished" in done.err
