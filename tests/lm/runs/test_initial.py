"""`jaxgru train --init MODEL`: training starts from the weights of another model."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
from conftest import TINY, contents, slow
from random_models import random_params

import jaxgru
from jaxgru.cells import CELLS
from jaxgru.lm import load
from jaxgru.lm.config import ModelConfig, config_names, load_config
from jaxgru.lm.data.tokenizers import TOKENIZERS, CharacterTokenizer, SentencePieceTokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import pretrained_names
from jaxgru.lm.runs.folders import RunInfo, load_info, save_config, save_info
from jaxgru.lm.runs.initial import config_from, initial_params, load_initial, load_text
from jaxgru.lm.runs.reports import published_losses
from study.jobs import all_jobs, find_job

FROZEN = {"training.learning_rate": 1e-30, "training.epochs": 1}  # steps change no weight


@pytest.fixture
def train(script, tmp_path, tiny_run):
    """Run `jaxgru train --init tiny_run` with options; the folder of its run, or the message."""

    def run(*options, init=tiny_run):
        done = script("train", "--runs", "runs", "--init", init, *options)
        if done.code == 2:
            assert done.err.startswith("jaxgru train: ") and done.err.count("\n") == 1
            assert not list(tmp_path.glob("runs/*/v*"))
            return done.err
        assert (done.code, done.err) == (0, "")
        [folder] = tmp_path.glob("runs/*/latest")
        return folder.resolve(), done.out

    return run


def options(values):
    return [f"--{name}={value}" for name, value in values.items()]


class TestWeights:
    @pytest.mark.parametrize("cell", ["gru", "rnn", *slow(*sorted(CELLS.keys() - {"gru", "rnn"}))])
    def test_with_another_vocabulary_logits_of_common_tokens_are_the_models(self, cell, tmp_path):
        """The model cannot tell its own tokens under new numbers, whatever the other rows are."""
        old = CharacterTokenizer("abcdefg")
        new = CharacterTokenizer("zgyfab")
        options = {"mlp": {"context_length": 2}, "rnn": {"tied_embedding": True}}.get(cell, {})
        model = ModelConfig(cell, 7, 5 + (cell == "rnn"), 6, 2, final_norm=True, **options)
        params = random_params(model)
        path = tmp_path / "model.safetensors"
        save_safetensors(path, params, jaxgru.lm.Config(model=model), old)
        model = dataclasses.replace(model, vocab_size=6)
        fresh = random_params(model, seed=1)
        ours, sentence = initial_params(fresh, load_initial(config_from(str(path))), new)
        assert "the 4 tokens that both vocabularies have; for the other 2 they are r" in sentence
        text = "gabfag"
        common = "gfab"
        apply = jax.jit(jaxgru.lm.apply)
        theirs, _ = apply(params, old.encode(text)[None])
        logits, _ = apply(ours, new.encode(text)[None])
        expected = theirs[..., old.encode(common)]
        np.testing.assert_allclose(logits[..., new.encode(common)], expected, rtol=1e-6)
        chex.assert_trees_all_equal((ours.layers, ours.norm), (params.layers, params.norm))
        drawn = new.encode("zy")
        chex.assert_trees_all_equal(ours.embedding[drawn], fresh.embedding[drawn])
        chex.assert_trees_all_equal(ours.Wo[:, drawn], fresh.Wo[:, drawn])
        chex.assert_trees_all_equal(ours.head.bo[drawn], fresh.head.bo[drawn])

    def test_pieces_of_words_are_matched_by_their_text(self, tiny_text):
        params, config, theirs = load("scribe_alpha")
        tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 60)
        model = dataclasses.replace(config.model, vocab_size=60)
        fresh = random_params(model)
        ours, _ = initial_params(fresh, load_initial(config_from("scribe_alpha")), tokenizer)
        common = set(tokenizer.pieces) & set(theirs.pieces)
        assert {"<unk>", "a"} <= common != set(tokenizer.pieces)
        for token, piece in enumerate(tokenizer.pieces):
            at = theirs.pieces.index(piece) if piece in common else None
            row = fresh.embedding[token] if at is None else params.embedding[at]
            np.testing.assert_array_equal(ours.embedding[token], row)

    def test_characters_and_pieces_of_words_have_nothing_in_common(self, tiny_text):
        _, config, _ = load("astra_alpha")
        tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 60)
        fresh = random_params(dataclasses.replace(config.model, vocab_size=60))
        ours, sentence = initial_params(fresh, load_initial(config_from("astra_alpha")), tokenizer)
        chex.assert_trees_all_equal((ours.embedding, ours.head), (fresh.embedding, fresh.head))
        assert "for the 0 tokens that both vocabularies have; for the other 60" in sentence


class TestVocabulary:
    @pytest.mark.parametrize("kind, mine, options, own, lacks", [
        ("characters", "a" * 999 + "x", {}, False, 0.001),
        ("characters", "a" * 999 + "x", {}, True, None),  # of its own text it is kept in any case
        ("characters", "a" * 999 + "b", {}, False, None),
        ("characters", "a" * 1000, {"data.min_count": 3}, True, 0),
        ("words", " a" * 990 + " x" * 10, {}, False, 0.01),
        ("words", " a" * 999 + " x", {}, False, None),  # which no new one would know, either
        ("words", " a" * 900 + " b" + " x" * 99, {"data.min_count": 100}, False, 0),
    ])  # fmt: skip
    def test_is_the_one_that_knows_more(self, kind, mine, options, own, lacks, tmp_path):
        """Of the model's, for None, and a new one; with a min_count, it is the new one."""
        theirs = TOKENIZERS[kind].learn({"characters": "ab", "words": " a b"}[kind] * 9, 0, 2)
        sizes = {"model.vocab_size": theirs.vocab_size, "model.hidden_dim": 3}
        config = load_config("astra_alpha", {"data.tokenizer": kind, **sizes})
        path = tmp_path / "model.safetensors"
        text = tmp_path / "mine.txt"
        save_safetensors(path, jaxgru.lm.init(jax.random.key(0), config.model), config, theirs)
        text.write_text(mine)
        config = config_from(str(path), {"data.corpus": str(text), **options})
        sha256 = hashlib.sha256(mine.encode()).hexdigest() if own else ""
        config, dataset, model = load_text(config, sha256)
        min_count = options.get("data.min_count", TOKENIZERS[kind].min_count)
        wanted = theirs if lacks is None else TOKENIZERS[kind].learn(mine, 0, min_count)
        assert dataset.tokenizer.to_bytes() == wanted.to_bytes()
        _, sentence = initial_params(random_params(config.model), model, dataset.tokenizer)
        says = f" Its own vocabulary lacks {lacks or 0:.1%} of the text's tokens."
        assert sentence.endswith(says) == bool(lacks)


class TestARun:
    def test_starts_from_the_model_and_keeps_its_tokenizer(self, train, tiny_run, tmp_path):
        """With a learning rate that changes nothing, the result is the model, bit for bit."""
        text = "the sun is in the east\n" * 100  # letters that the model knows, but not all
        (tmp_path / "mine.txt").write_text(text)
        run, out = train("--data.corpus", "mine.txt", *options(FROZEN))
        params, config, tokenizer = jaxgru.lm.load(run)
        theirs, _, vocabulary = jaxgru.lm.load(tiny_run)
        chex.assert_trees_all_equal(params, theirs)
        assert tokenizer.to_bytes() == vocabulary.to_bytes()
        assert f"training starts from {tiny_run} (SHA-256 " in out
        assert f"the {tokenizer.vocab_size} tokens that both vocabularies have" in out
        assert config.name == "astra_alpha-mine" and config.training.init_from == str(tiny_run)
        assert out.count(load_info(run).init_sha256[:12]) == 1
        assert json.loads((run / "metrics.jsonl").read_text())["step"] == 3

    @pytest.mark.slow
    def test_is_resumed_without_the_model(self, train, script, tiny_run, tmp_path):
        """The second epoch of a lengthened run is that of an undisturbed run from the model."""
        model = shutil.copytree(tiny_run, tmp_path / "model")
        run, _ = train(*options({"training.epochs": 1}), init=model)
        shutil.rmtree(model)
        done = script("train", "--resume", run, "--training.epochs", 2)
        assert (done.code, done.err) == (0, "")
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    @pytest.mark.slow
    def test_stopped_before_its_first_checkpoint_starts_from_the_model_again(
        self, train, script, tiny_run, tmp_path
    ):
        run, _ = train(*options(FROZEN))
        shutil.rmtree(run / "checkpoints")
        assert script("train", "--resume", run).code == 0
        chex.assert_trees_all_equal(jaxgru.lm.load(run)[0], jaxgru.lm.load(tiny_run)[0])
        shutil.rmtree(run / "checkpoints")
        save_info(run, dataclasses.replace(load_info(run), init_sha256="0" * 64))
        done = script("train", "--resume", run)
        assert done.code == 2 and "has changed: its SHA-256 is" in done.err

    @pytest.fixture
    def mine(self, run_copy, tmp_path):
        family = tmp_path / "runs" / "mine"
        family.mkdir(parents=True)
        (family / "latest").symlink_to("v1")
        return run_copy.rename(family / "v1")

    @pytest.mark.slow
    def test_may_have_the_models_name(self, train, mine):
        """Then the model is the version before the new run, though `latest` moves."""
        run, _ = train("--name", "mine", *options(FROZEN), init="runs/mine")
        assert run.name == "v2"
        params, config, _ = jaxgru.lm.load(run)
        chex.assert_trees_all_equal(params, jaxgru.lm.load(mine)[0])
        assert config.training.init_from == str(mine)

    def test_that_fails_hides_no_run_of_its_name(self, script, mine):
        shutil.rmtree(mine / "checkpoints")
        before = contents(mine.parent)
        done = script("train", "--runs", "runs", "--name", "mine", "--init", "runs/mine")
        assert done.code == 2 and "v1 has no finished checkpoint" in done.err
        assert contents(mine.parent) == before

    def test_is_never_the_studys(self, tmp_path):
        """Nor is a run that was lengthened, though nothing else differs from the study's."""
        for name in set(pretrained_names()) & set(config_names()):
            config = load_config(name, {"training.init_from": name})
            assert published_losses(config, RunInfo()) == {}
        job = next(job for job in all_jobs() if job.name == "astra_alpha")
        folder = tmp_path / "astra_alpha" / "v1"
        folder.mkdir(parents=True)
        training = dataclasses.replace(job.config.training, init_from="astra_alpha")
        from_weights = dataclasses.replace(job.config, training=training)
        for config, info, same in ((job.config, RunInfo(), True), (from_weights, RunInfo(), False),
                                   (job.config, RunInfo(lengthened=1), False)):  # fmt: skip
            save_info(folder, info)
            save_config(folder, config)
            assert find_job(tmp_path, job) == (folder if same else None)


class TestConfig:
    def test_is_the_models_own(self, run_copy, tmp_path):
        """But for what is only true of its own text."""
        params, theirs, tokenizer = jaxgru.lm.load(run_copy)
        usual = theirs.data
        replace = dataclasses.replace
        data = replace(usual, encoding="cp1252", validation="./v.txt", validation_fraction=0.5)
        theirs = replace(theirs, data=replace(data, min_count=3))
        save_config(run_copy, theirs)
        files = tmp_path / "model.safetensors", tmp_path / "model.onnx"
        for path in files:
            jaxgru.lm.save(path, params, theirs, tokenizer)
        for model in (run_copy, *files):
            own = config_from(str(model)).data
            assert own == replace(data, corpus=own.corpus)
            given = {"data.corpus": "mine.txt", "data.encoding": "utf-16"}
            assert config_from(str(model), given).data.encoding == "utf-16"
            config = config_from(str(model), {"data.corpus": "mine.txt", "training.epochs": 7})
            assert (config.name, config.model) == ("astra_alpha-mine", theirs.model)
            assert config.data == replace(usual, corpus="mine.txt")
            assert config.training == replace(theirs.training, epochs=7, init_from=str(model))

    def test_is_read_before_jax_starts(self, tiny_run, tmp_path):
        """From then on, a CPU's cores could not become devices."""
        files = [tmp_path / f"model{suffix}" for suffix in (".safetensors", ".onnx")]
        for path in files:
            jaxgru.lm.save(path, *load(tiny_run))
        code = (
            "import sys, jax\nfrom jaxgru.lm.runs.initial import config_from\n"
            "for model in sys.argv[1:]: config_from(model)\n"
            "jax.config.update('jax_num_cpu_devices', 3)\nassert len(jax.devices()) == 3"
        )
        subprocess.run([sys.executable, "-c", code, tiny_run, *files], check=True)

    @pytest.mark.slow
    def test_can_be_another_of_the_same_sizes(self, train, tiny_text):
        sizes = {k: v for k, v in TINY.items() if k.startswith("model.")}
        recipe = {"training.batch_size": 2, "training.sequence_length": 8, **FROZEN}
        run, _ = train("--config", "astra_alpha", "--data.corpus", tiny_text,
                       "--training.steps-per-epoch", 1, "--training.state_dropout", 0.3,
                       *options(sizes | recipe))  # fmt: skip
        assert load_config(run / "config.toml").training.state_dropout == 0.3


def test_what_no_run_can_start_from(train, tiny_run, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"\x10" * 100)
    assert "is not a whole safetensors file" in train(init="damaged.safetensors")
    message = train("--model.hidden-dim", 10, "--data.corpus", "not-read.txt")
    assert f"from {tiny_run}: its model.hidden_dim is 9, and this config's is 10" in message
    assert "or both (to start a run), or --resume RUN alone" in train("--resume", tiny_run)
