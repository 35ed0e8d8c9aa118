"""Configs: the published table, round trips, and a refusal of every value that cannot be used."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

import jaxgru
from jaxgru.cli.options import parse_fields
from jaxgru.lm.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TrainingConfig,
    config_names,
    dotted_names,
    from_dict,
    load_config,
    reading,
    to_dict,
)
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.runs.reports import published_losses
from study.records import PublishedResults, load_published

# The reference's table of models, copied by hand: cell, vocabulary, embedding, hidden, layers,
# dropout, epochs, steps an epoch, learning rate, parameters.
PUBLISHED = {
    "astra_alpha": ("gru", 65, 64, 128, 1, 0.1, 10, 200, 3e-3, 86_913),
    "astra_beta": ("gru", 65, 128, 256, 2, 0.1, 15, 250, 2e-3, 715_713),
    "astra_gamma": ("gru", 65, 256, 512, 3, 0.1, 20, 400, 1e-3, 4_383_041),
    "scribe_alpha": ("gru", 1000, 128, 256, 2, 0.1, 10, 300, 2e-3, 1_075_688),
    "scribe_beta": ("gru", 1000, 256, 512, 3, 0.1, 15, 350, 1.5e-3, 5_102_056),
    "scribe_gamma": ("gru", 1000, 384, 768, 4, 0.15, 20, 450, 1e-3, 14_439_400),
    "leviathan": ("lstm", 65, 768, 1024, 3, 0.2, 6, 200, 1e-3, 24_248_129),
}
# First and last training loss of each published run, and the last validation loss where given.
LOSSES = {
    "astra_alpha": ([(2.2413, 1.6276), (2.2416, 1.6332)], [1.7015, 1.6462]),
    "astra_beta": ([(1.9937, 1.3542), (1.9930, 1.3519)], [1.4872, 1.4498]),
    "astra_gamma": ([(1.7853, math.nan), (1.7801, 1.0990)], [math.nan, 1.4519]),
    "scribe_alpha": ([(4.3808, 2.9495)], [4.0641]),
    "scribe_beta": ([(3.9959, 2.0360)], [4.7648]),
    "scribe_gamma": ([(5.8324, 2.6766)], [4.4206]),
    "leviathan": ([(2.4545, 1.1935)], [1.4981]),
}
STOPPED_AT = {"scribe_alpha": 8, "scribe_beta": 6, "scribe_gamma": 8}

models = pytest.mark.parametrize("name", PUBLISHED)


def parameter_count(model: ModelConfig) -> int:
    params = jax.eval_shape(lambda: jaxgru.lm.init(jax.random.key(0), model))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class TestPublishedConfigs:
    def test_all_seven_are_known_two_to_compare_with_and_the_best(self):
        assert config_names() == sorted([*PUBLISHED, "elman_alpha", "bengio_mlp", "best_gru"])

    def test_the_elman_network_is_astra_alpha_with_another_cell(self):
        elman, astra = load_config("elman_alpha"), load_config("astra_alpha")
        assert (elman.training, elman.data) == (astra.training, astra.data)
        changed = dataclasses.replace(
            elman.model, cell="gru", second_bias=True, reset_gate="before"
        )
        assert changed == astra.model
        # 65·64 + 64·128 + 128² + 128 + 128·65 + 65
        assert parameter_count(elman.model) == 37_249

    def test_bengios_network_is_as_large_as_astra_alpha(self):
        mlp, astra = load_config("bengio_mlp"), load_config("astra_alpha")
        recipe = dataclasses.replace(astra.training, dropout=0.0)
        assert (mlp.training, mlp.data) == (recipe, astra.data)
        # 65·64 + 7·64·160 + 160 + 160·65 + 65, where astra_alpha has 86,913
        assert parameter_count(mlp.model) == 86_465

    @models
    def test_numbers_are_the_tables(self, name):
        config = load_config(name)
        model, training = config.model, config.training
        assert PUBLISHED[name] == (
            model.cell,
            model.vocab_size,
            model.embedding_dim,
            model.hidden_dim,
            model.num_layers,
            training.dropout,
            training.epochs,
            training.steps_per_epoch,
            training.learning_rate,
            load_published(name).num_params,
        )
        assert config.name == name

    @models
    def test_shared_numbers(self, name):
        config = load_config(name)
        t = config.training
        assert (t.batch_size, t.sequence_length) == (64, 128)
        assert (t.beta1, t.beta2, t.epsilon) == (0.9, 0.999, 1e-8)
        assert (t.weight_decay, t.max_grad_norm) == (0.01, 1.0)
        assert t.patience == (5 if name.startswith("scribe") else 0)
        assert config.data.corpus == "tiny_shakespeare"
        assert config.data.validation_fraction == 0.1
        subwords = name.startswith("scribe")
        assert config.data.tokenizer == ("sentencepiece" if subwords else "characters")

    @models
    def test_variants_of_the_study(self, name):
        """GRU: a second bias, dropout inside the recurrence. LSTM: LayerNorm, dropout after it."""
        model, training = load_config(name).model, load_config(name).training
        assert model.reset_gate == ("before" if model.cell == "gru" else "after")
        variant = (model.second_bias, training.dropout_site, model.final_norm)
        lstm = name == "leviathan"
        assert variant == ((False, "output", True) if lstm else (True, "state", False))

    @models
    def test_parameter_count_of_the_model_itself(self, name):
        assert parameter_count(load_config(name).model) == PUBLISHED[name][-1]

    def test_validation_losses_are_given_for_every_epoch(self):
        """As the study's logs have them, but for the last three of astra_gamma's first run."""
        val = {name: load_published(name).val_loss for name in PUBLISHED}
        counts = {name: [sum(map(math.isfinite, run)) for run in val[name]] for name in val}
        assert counts["astra_alpha"] == [10, 10] and counts["astra_beta"] == [15, 15]
        assert counts["astra_gamma"] == [17, 20]
        assert np.mean(val["astra_gamma"][1][-10:]) == pytest.approx(1.4484, abs=5e-5)
        assert val["astra_alpha"][0][0] == 1.8872 and val["astra_beta"][1][0] == 1.7159

    @models
    def test_losses_are_the_published_ones(self, name):
        config = load_config(name)
        train, val = LOSSES[name]
        published = load_published(name)
        assert len(published.train_loss) == len(train)
        for run, (first, last) in zip(published.train_loss, train, strict=True):
            assert len(run) == STOPPED_AT.get(name, config.training.epochs)
            assert run[0] == first
            assert run[-1] == pytest.approx(last, abs=0, nan_ok=True)
        last = [run[-1] for run in published.val_loss]
        assert last == pytest.approx(val, abs=0, nan_ok=True)
        assert all(len(run) == len(published.train_loss[0]) for run in published.val_loss)

    def test_the_other_configs_have_no_published_results(self):
        assert load_published("elman_alpha") == load_published("mine") == PublishedResults()

    def test_configs_inside_an_installed_package_come_first(self, monkeypatch, tmp_path):
        (tmp_path / "jaxgru" / "configs").mkdir(parents=True)
        (tmp_path / "jaxgru" / "configs" / "inside.toml").write_text("[model]\nhidden_dim = 3")
        installed = tmp_path / "jaxgru" / "lm" / "config" / "reading.py"
        monkeypatch.setattr(reading, "__file__", str(installed))
        published = tmp_path / "jaxgru" / "configs" / "published"
        published.mkdir()
        (published / "inside.toml").write_text("num_params = 5")
        assert config_names() == ["inside"]
        assert load_config("inside").model.hidden_dim == 3
        assert load_published("inside") == PublishedResults(num_params=5)

    def test_wheel_carries_the_configs_into_the_package(self):
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        build = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]
        assert build["targets"]["wheel"]["force-include"]["configs"] == "jaxgru/configs"


def numbers(
    low: float, high: float, exclude_min: bool = False, exclude_max: bool = False
) -> st.SearchStrategy[float]:
    """Without 0 or 1, which is judged as float32 has them."""
    return st.floats(2**-126 if exclude_min else low, 1 - 2**-24 if exclude_max else high)


sizes = st.integers(1, 1000)  # no product of three is 2^31
models_of_any_kind = st.sampled_from(["gru", "lstm", "rnn", "mlp"]).flatmap(
    lambda cell: st.builds(
        ModelConfig,
        cell=st.just(cell),
        vocab_size=sizes,
        embedding_dim=sizes,
        hidden_dim=sizes,
        num_layers=st.integers(1, 1023),
        context_length=st.integers(1, 1023) if cell == "mlp" else st.just(0),
        second_bias=st.booleans() if cell == "gru" else st.just(False),
        reset_gate=st.sampled_from(["before", "after"] if cell == "gru" else ["after"]),
        final_norm=st.booleans(),
    )
)
configs = st.builds(
    Config,
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    model=models_of_any_kind,
    data=st.builds(
        DataConfig,
        corpus=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        tokenizer=st.sampled_from(["characters", "subwords", "sentencepiece", "bytes", "words"]),
        min_count=sizes,
        encoding=st.sampled_from(["utf-8", "latin-1"]),
        validation_fraction=numbers(0, 1, exclude_max=True),
    ),
    training=st.builds(
        TrainingConfig,
        epochs=sizes,
        steps_per_epoch=sizes,
        batch_size=sizes,
        sequence_length=sizes,
        learning_rate=numbers(0, 1e3, exclude_min=True),
        weight_decay=numbers(0, 1e3),
        beta1=numbers(0, 1, exclude_max=True),
        beta2=numbers(0, 1, exclude_max=True),
        epsilon=numbers(0, 1, exclude_min=True),
        max_grad_norm=numbers(0, 1e9, exclude_min=True),
        dropout=numbers(0, 1, exclude_max=True),
        dropout_site=st.sampled_from(["state", "between", "output"]),
        patience=st.integers(0, 100),
        seed=st.integers(0, 2**32 - 1),
    ),
)


class TestRoundTrip:
    @given(configs)
    def test_through_a_dictionary_and_through_toml(self, config):
        assert from_dict(to_dict(config)) == config
        assert from_dict(tomllib.loads(tomli_w.dumps(to_dict(config)))) == config

    @pytest.mark.parametrize("name", [*PUBLISHED, "best_gru"])
    def test_of_the_ones_that_come_with_it(self, name):
        config = load_config(name)
        assert from_dict(tomllib.loads(tomli_w.dumps(to_dict(config)))) == config

    def test_a_file_gives_its_name_unless_it_says_one(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text("[model]\nhidden_dim = 7\n")
        assert load_config(path) == Config(name="mine", model=ModelConfig(hidden_dim=7))
        path.write_text("name = 'other'\n")
        assert load_config(str(path)) == Config(name="other")

    def test_an_integer_is_a_number_too(self):
        config = from_dict({"training": {"learning_rate": 1}})
        assert config.training.learning_rate == 1.0
        assert isinstance(config.training.learning_rate, float)


class TestPublishedResults:
    """What the study reports belongs to its text and recipe; no config has it."""

    @pytest.mark.parametrize(
        "overrides, kept",
        [
            ({}, True),
            ({"name": "mine"}, True),
            ({"training.seed": 3}, True),
            ({"training.keep_epochs": True, "training.seed": 3}, True),
            ({"training.remat": True, "data.corpus": "tiny_shakespeare"}, True),
            ({"training.epochs": 10}, True),  # as published
            ({"training.epochs": 11}, False),
            ({"training.dropout": 0}, False),
            ({"data.batches": "streams"}, False),
            ({"data.corpus": "tiny_shakespeare.txt"}, False),
        ],
    )
    def test_of_a_run_are_those_of_its_text_and_recipe(self, overrides, kept):
        config = load_config("astra_alpha", overrides)
        found = published_losses(config, RunInfo())
        assert found.get("train_loss") == (
            load_published("astra_alpha").train_loss if kept else None
        )
        assert published_losses(config, RunInfo(lengthened=1)) == {}

    @models
    def test_each_config_has_its_own(self, name):
        config = dataclasses.replace(load_config(name), name="any")
        assert published_losses(config, RunInfo())["num_params"] == PUBLISHED[name][-1]


class TestFrozen:
    def test_fields_cannot_be_set(self):
        config = load_config("astra_alpha")
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.name = "other"
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.training.dropout = 0.5

    def test_equal_configs_hash_alike(self):
        a, b = (from_dict({"model": {"hidden_dim": 3}}) for _ in range(2))
        assert a == b and hash(a) == hash(b)
        assert len({a, b, from_dict({"model": {"hidden_dim": 4}})}) == 2


class TestOverrides:
    @pytest.mark.parametrize(
        "dotted, text, value",
        [
            ("training.epochs", "5", 5),
            ("training.epochs", "1_000", 1000),
            ("training.learning_rate", "1e-4", 1e-4),
            ("training.learning_rate", "1", 1.0),
            ("training.learning_rate", ".001", 1e-3),
            ("training.dropout", "0", 0.0),
            ("model.final_norm", "true", True),
            ("model.final_norm", "True", True),
            ("model.second_bias", "false", False),
            ("model.second_bias", "FALSE", False),
            ("model.cell", "gru", "gru"),
            ("data.corpus", "some folder/my text.txt", "some folder/my text.txt"),
            ("data.corpus", "2024", "2024"),
            ("data.corpus", "true", "true"),
        ],
    )
    def test_are_read_as_typed(self, dotted, text, value):
        section, field = dotted.split(".")
        config = load_config("astra_alpha", parse_fields({dotted: text}))
        seen = getattr(getattr(config, section), field)
        assert seen == value and type(seen) is type(value)

    def test_change_nothing_else(self):
        plain = load_config("astra_beta")
        changed = load_config("astra_beta", {"training.seed": 3})
        again = dataclasses.replace(changed, training=dataclasses.replace(changed.training, seed=0))
        assert changed.training.seed == 3
        assert repr(again) == repr(plain)

    @pytest.mark.parametrize("dotted", ["training.epoch", "model.hiden_dim", "model", "x.y", ""])
    def test_of_unknown_fields_are_refused(self, dotted):
        with pytest.raises(ConfigError, match=re.escape(repr(dotted))):
            load_config("astra_alpha", {dotted: 1})


TOO_MANY = str(10**12)  # below the bound on any one number, above that on products
BAD_VALUES = {
    "training.implementation": ["fast", "Scan", "0"],
    "model.cell": ["transformer", "GRU", "5"],
    "model.vocab_size": ["0", "-1", "6.5", TOO_MANY],
    "model.embedding_dim": ["0", "nan", TOO_MANY],
    "model.hidden_dim": ["0", "-128", "wide", "128.0", TOO_MANY],
    "model.num_layers": ["0", "true", "1024", TOO_MANY],
    "model.context_length": ["-1", "1024", "3.5", "7"],
    "model.num_blocks": ["0", "-1", "1.5", "3"],
    "model.proj_size": ["-1", "2.5", "7"],
    "model.second_bias": ["1", "yes", "Falsch"],
    "model.reset_gate": ["never", "true"],
    "model.final_norm": ["0", "no"],
    "training.schedule": ["Cosine", "step", "0"],
    "training.warmup_steps": ["-1", "2.5", "true", str(2**31)],
    "training.dropout": ["1.0", "1", "-0.1", "nan", "inf", "a lot", "true"],
    "training.dropout_site": ["input", "0"],
    "training.input_dropout": ["1", "-0.1"],
    "training.between_dropout": ["1", "-0.1"],
    "training.output_dropout": ["1", "-0.1"],
    "training.weight_drop": ["1", "-0.1", "nan"],
    "training.ema_decay": ["1", "-0.1", "true"],
    "training.random_offset": ["1", "yes"],
    "training.reset_probability": ["1", "-0.1"],
    "training.decay_biases": ["0", "no"],
    "training.compute_dtype": ["float16", "16"],
    "data.tokenizer": ["bpe", "1"],
    "data.min_count": ["0", "1.5"],
    "data.encoding": ["utf-9", "hex", ""],
    "data.batches": ["crop", "true"],
    "data.validation_fraction": ["1", "-0.1", "nan", "tenth"],
    "training.epochs": ["0", "-3", "2.5", "many", "true", "9" * 5000, TOO_MANY],
    "training.steps_per_epoch": ["0", TOO_MANY],
    "training.batch_size": ["0", "-64", "64.0", TOO_MANY],
    "training.gradient_accumulation": ["0", "1.5", TOO_MANY],
    "training.shard_parameters": ["1", "yes", ""],
    "training.sequence_length": ["0", TOO_MANY],
    "training.learning_rate": ["0", "-1e-3", "inf", "nan", "fast", "1" + "0" * 400],
    "training.weight_decay": ["-0.01", "inf"],
    "training.beta1": ["1", "-0.1"],
    "training.beta2": ["1.0", "-1"],
    "training.epsilon": ["0", "-1e-8"],
    "training.max_grad_norm": ["0", "-1", "inf"],
    "training.remat": ["1", "yes"],
    "training.keep_epochs": ["0", "all"],
    "training.tensorboard": ["1", "yes"],
    "training.patience": ["-1", "1.5"],
    "training.seed": ["-1", "4294967296", "0.5"],
}


class TestRefusals:
    def test_every_bounded_field_is_tried(self):
        """A field added later must be added here, unless any text will do for it."""
        free = {"data.corpus", "data.validation", "data.tokenizer_file", "training.init"}
        assert set(dotted_names()) - free - set(BAD_VALUES) == set()

    @pytest.mark.parametrize(
        "dotted, text", [(name, text) for name, texts in BAD_VALUES.items() for text in texts]
    )
    def test_a_value_out_of_range_or_of_the_wrong_type(self, dotted, text):
        with pytest.raises(ConfigError, match=re.escape(f"{dotted} ")) as refusal:
            load_config("astra_alpha", parse_fields({dotted: text}))
        assert "must be" in str(refusal.value)

    @pytest.mark.parametrize(
        "overrides, says",
        [
            ({"model.num_layers": 1}, "between_dropout is 0.15; it must be 0.0, because with one"),
            ({"training.dropout": 0.1, "training.dropout_site": "output"},
             "output_dropout is 0.2; it must be 0.0, because training.dropout drops units"),
            ({"training.dropout": 0.1, "training.dropout_site": "between"},
             "between_dropout is 0.15; it must be 0.0, because training.dropout drops units there"),
            ({"model.cell": "mlp", "model.context_length": 3},
             "weight_drop is 0.3; it must be 0.0, because the cell mlp has no recurrent matrices."),
            ({"model.cell": "min_gru"}, "weight_drop is 0.3; it must be 0.0, because the cell min"),
            ({"data.batches": "crops"},
             "random_offset is true; it must be false, because only streams use it, and data."),
            ({"data.batches": "crops", "training.random_offset": False},
             "reset_probability is 0.25; it must be 0.0, because only streams use it, and"),
        ],
    )  # fmt: skip
    def test_a_field_that_makes_no_sense_with_another(self, overrides, says):
        with pytest.raises(ConfigError, match=re.escape(f"training.{says}")):
            load_config("best_gru", overrides)
        assert load_config("best_gru", {"training.dropout": 0.1})  # inside the recurrence

    @pytest.mark.parametrize(
        "set_dropout",
        [
            lambda rate: TrainingConfig(dropout=rate),
            lambda rate: dataclasses.replace(TrainingConfig(), dropout=rate),
            lambda rate: from_dict({"training": {"dropout": rate}}),
            lambda rate: load_config("leviathan", {"training.dropout": rate}),
        ],
    )
    def test_whichever_way_a_value_is_set(self, set_dropout):
        says = "training.dropout is 1.0; it must be at least 0 and below 1."
        with pytest.raises(ConfigError, match=re.escape(says)):
            set_dropout(1.0)

    @pytest.mark.parametrize(
        "name, value, on_device, wanted",
        [
            ("training.beta1", "0.99999999", "1.0", "at least 0 and below 1"),
            ("training.beta2", "0.99999999", "1.0", "at least 0 and below 1"),
            ("training.dropout", "0.99999999", "1.0", "at least 0 and below 1"),
            ("training.learning_rate", "1e-50", "0.0", "above 0"),
            ("training.epsilon", "1e-39", "0.0", "above 0"),  # CPUs flush it to 0
            ("training.max_grad_norm", "1e-46", "0.0", "above 0"),
            ("training.learning_rate", "1e39", "inf", "above 0 and below 2^128"),
            ("training.weight_decay", "1e39", "inf", "at least 0 and below 2^128"),
        ],
    )
    def test_a_number_is_judged_as_float32_has_it(self, name, value, on_device, wanted):
        says = f"{name} is {float(value)}, which is {on_device} in float32; it must be {wanted}."
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_config("astra_alpha", parse_fields({name: value}))

    def test_the_nearest_numbers_that_float32_has(self):
        for name, value in (("beta1", 1 - 2**-24), ("epsilon", 2.0**-126), ("beta2", 1e-30)):
            assert getattr(TrainingConfig(**{name: value}), name) == value

    def test_a_file_may_begin_with_a_mark(self, tmp_path):
        """As Notepad writes it, and PowerShell 5 with `-Encoding utf8`."""
        path = tmp_path / "mine.toml"
        path.write_bytes("\ufeff[model]\nhidden_dim = 3\n".encode())
        assert load_config(path).model.hidden_dim == 3

    @pytest.mark.parametrize(
        "section, sizes",
        [
            (TrainingConfig, {"sequence_length": 2**16, "batch_size": 2**15}),
            (TrainingConfig, {"batch_size": 2**16, "gradient_accumulation": 2**8}),  # × 128
            (TrainingConfig, {"epochs": 2**16, "steps_per_epoch": 2**15}),
            (ModelConfig, {"embedding_dim": 2**16, "vocab_size": 2**15, "hidden_dim": 1}),
            (ModelConfig, {"embedding_dim": 2**16, "hidden_dim": 2**15, "vocab_size": 1}),
            (ModelConfig, {"vocab_size": 2**16, "hidden_dim": 2**15, "embedding_dim": 1}),
            (ModelConfig, {"embedding_dim": 2**16, "cell": "mlp", "context_length": 2**8}),  # × 128
        ],
    )
    def test_a_product_of_sizes_that_32_bits_cannot_count(self, section, sizes):
        """2^31 is refused; one less of the first, and it is below."""
        with pytest.raises(ConfigError, match=r" × .* × .*; it must be below 2\^31, because JAX"):
            section(**sizes)
        first = next(iter(sizes))
        section(**sizes | {first: sizes[first] - 1})

    def test_a_square_matrix_that_32_bits_cannot_count(self):
        """46341² is the first square above 2^31."""
        sizes = {"vocab_size": 1, "embedding_dim": 1}
        ModelConfig(**sizes, hidden_dim=46340)
        with pytest.raises(ConfigError, match="model.hidden_dim × model.hidden_dim is 46341 × 46"):
            ModelConfig(**sizes, hidden_dim=46341)

    @pytest.mark.parametrize("cell", ["lstm", "rnn"])
    def test_options_of_a_gru_belong_to_a_gru(self, cell):
        with pytest.raises(ConfigError, match=f"second_bias.*{cell}"):
            ModelConfig(cell=cell, second_bias=True)
        with pytest.raises(ConfigError, match=f"reset.*{cell}"):
            ModelConfig(cell=cell, reset_gate="before")

    @pytest.mark.parametrize("cell, length", [("gru", 1), ("lstm", 7), ("rnn", 1), ("mlp", 0)])
    def test_a_context_length_belongs_to_an_mlp(self, cell, length):
        with pytest.raises(ConfigError, match=f"context_length is {length};.*this cell is {cell}"):
            ModelConfig(cell=cell, context_length=length)

    def test_a_projection_has_a_size(self):
        with pytest.raises(ConfigError, match="proj_size is 0; it must be at least 1"):
            ModelConfig(cell="projected_lstm")
        with pytest.raises(
            ConfigError, match="num_blocks is 2.*only for gru, layer_norm_gru, lstm, la"
        ):
            ModelConfig(cell="rnn", num_blocks=2)

    def test_an_unknown_config_lists_the_known_ones(self):
        with pytest.raises(ConfigError) as refusal:
            load_config("nowhere")
        assert all(name in str(refusal.value) for name in ["nowhere", *PUBLISHED])
        with pytest.raises(ConfigError, match="no config 'levithan'; the nearest is leviathan."):
            load_config("levithan")

    @pytest.mark.parametrize("name", ["", "../configs/astra_alpha", "configs/astra_alpha", "*"])
    def test_a_path_without_its_ending_is_no_name(self, name):
        with pytest.raises(ConfigError, match="there is no config"):
            load_config(name)

    @pytest.mark.parametrize(
        "table, unknown, meant",
        [
            ({"model": {"hidden_dims": 3}}, "model.hidden_dims", "nearest is 'model.hidden_dim'"),
            (
                {"training": {"learning-rate": 1.0}},
                "training.learning-rate",
                "'training.learning_rate'",
            ),
            ({"training": {"lr": 1.0}}, "training.lr", "nearest is 'training.learning_rate'"),
            ({"model": {"rnn_size": 3}}, "model.rnn_size", "nearest is 'model.hidden_dim'"),
            ({"model": {"heads": 3}}, "model.heads", "the fields are model.cell, "),
            ({"trainning": {}}, "trainning", "nearest is 'training'"),
            ({"hidden_dim": 3}, "hidden_dim", "the sections are "),
        ],
    )
    def test_an_unknown_field_or_section_names_the_nearest(self, table, unknown, meant):
        with pytest.raises(ConfigError) as refusal:
            from_dict(table)
        assert repr(unknown) in str(refusal.value)
        assert meant in str(refusal.value)

    @pytest.mark.parametrize("section", [3, "gru", [{"cell": "gru"}], True])
    def test_a_section_that_is_no_table(self, section):
        with pytest.raises(ConfigError, match=r"model is .*must be a table"):
            from_dict({"model": section})

    @pytest.mark.parametrize(
        "data", [b"[model", b"hidden_dim 3", b"[model]\ncell = ", b"\xff", b"a = 1\na = 2"]
    )
    def test_a_file_that_is_not_toml(self, tmp_path, data):
        (tmp_path / "bad.toml").write_bytes(data)
        with pytest.raises(ConfigError, match=r"bad\.toml is not a TOML file"):
            load_config(tmp_path / "bad.toml")

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
    def test_a_file_in_another_unicode(self, tmp_path, encoding):
        (tmp_path / "bad.toml").write_text("[model]\n", encoding)
        with pytest.raises(
            ConfigError, match=r"contains bytes of 0, as UTF-16 does; save it as UTF-8"
        ):
            load_config(tmp_path / "bad.toml")

    def test_a_file_that_is_not_there_or_a_folder(self, tmp_path):
        (tmp_path / "folder.toml").mkdir()
        with pytest.raises(ConfigError, match=r"there is no config file .*missing\.toml"):
            load_config(tmp_path / "missing.toml")
        with pytest.raises(ConfigError, match=r"folder\.toml cannot be read: Is a directory\."):
            load_config(tmp_path / "folder.toml")

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", ".hidden", "-a", "a\n", "a b", 3, None]
    )
    def test_a_name_that_is_no_folder_of_its_own(self, name):
        with pytest.raises(ConfigError, match="name is"):
            from_dict({"name": name})

    @pytest.mark.parametrize("name", ["", "..", "a/b"])
    def test_such_a_name_set_directly(self, name):
        with pytest.raises(ConfigError, match="name is"):
            Config(name=name)
        with pytest.raises(ConfigError, match="name is"):
            dataclasses.replace(Config(), name=name)
