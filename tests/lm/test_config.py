"""Configs: the published ones, round trips, and a refusal of every value that cannot be used."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib

import jax
import pytest
import tomli_w

import jaxgru
from jaxgru.cells import CELLS, register
from jaxgru.cells.contract import options_of_cell
from jaxgru.cli.options import Parser, config_overrides
from jaxgru.lm import config as configs
from jaxgru.lm.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig
from jaxgru.lm.config.fields import choices, field_types
from jaxgru.lm.config.reading import config_dir, config_names, from_dict, load_config, to_dict
from jaxgru.lm.config.sections import SECTIONS, dotted_names
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.runs.reports import published_losses
from study.study_records import PublishedResults, load_published

PUBLISHED = sorted(path.stem for path in (config_dir() / "published").glob("*.toml"))


def typed(*options: str) -> dict[str, object]:
    """The fields that these options set, by name."""
    parser = Parser(None)
    parser.add_config_fields(Config())
    return config_overrides(parser.parse_args(options))


def parameter_count(model: ModelConfig) -> int:
    params = jax.eval_shape(lambda: jaxgru.lm.init(jax.random.key(0), model))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class TestPublishedConfigs:
    def test_the_elman_network_is_astra_alpha_with_another_cell(self):
        elman = load_config("elman_alpha")
        astra = load_config("astra_alpha")
        assert (elman.training, elman.data) == (astra.training, astra.data)
        options = {"cell": "gru", "second_bias": True, "reset_gate": "before"}
        assert dataclasses.replace(elman.model, **options) == astra.model
        # 65·64 + 64·128 + 128² + 128 + 128·65 + 65
        assert parameter_count(elman.model) == 37_249

    def test_bengios_network_is_as_large_as_astra_alpha(self):
        mlp = load_config("bengio_mlp")
        astra = load_config("astra_alpha")
        recipe = dataclasses.replace(astra.training, state_dropout=0.0)
        assert (mlp.training, mlp.data) == (recipe, astra.data)
        # 65·64 + 7·64·160 + 160 + 160·65 + 65, where astra_alpha has 86,913
        assert parameter_count(mlp.model) == 86_465

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_published_results_are_of_the_config_of_that_name(self, name):
        """Their parameters are as many. Their epochs are, too, unless it stops early."""
        config = load_config(name)
        published = load_published(name)
        assert parameter_count(config.model) == published.num_params
        unnamed = dataclasses.replace(config, name="any")
        assert published_losses(unnamed, RunInfo())["num_params"] == published.num_params
        (epochs,) = {len(run) for run in (*published.train_loss, *published.val_loss)}
        most = config.training.epochs
        assert epochs < most if config.training.patience else epochs == most

    def test_configs_inside_an_installed_package_come_first(self, monkeypatch, tmp_path):
        (tmp_path / "jaxgru" / "configs" / "published").mkdir(parents=True)
        (tmp_path / "jaxgru" / "configs" / "inside.toml").write_text("[model]\nhidden_dim = 3")
        installed = tmp_path / "jaxgru" / "lm" / "config" / "reading.py"
        monkeypatch.setattr(configs.reading, "__file__", str(installed))
        published = tmp_path / "jaxgru" / "configs" / "published"
        (published / "inside.toml").write_text("num_params = 5")
        assert config_names() == ["inside"]
        assert load_config("inside").model.hidden_dim == 3
        assert load_published("inside") == PublishedResults(num_params=5)


class TestRoundTrip:
    @pytest.mark.parametrize("name", config_names())
    def test_through_toml(self, name):
        config = load_config(name)
        again = from_dict(tomllib.loads(tomli_w.dumps(to_dict(config))))
        assert again == config and hash(again) == hash(config)
        assert again != load_config(name, {"training.seed": 1})

    def test_a_file_gives_its_name_unless_it_says_one(self, tmp_path):
        """It may begin with a mark, as Notepad writes it."""
        path = tmp_path / "mine.toml"
        path.write_bytes("\ufeff[model]\nhidden_dim = 7\n".encode())
        assert load_config(path) == Config(name="mine", model=ModelConfig(hidden_dim=7))
        path.write_text("name = 'other'\n")
        assert load_config(str(path)) == Config(name="other")

    def test_an_integer_is_a_number_too(self):
        rate = from_dict({"training": {"learning_rate": 1}}).training.learning_rate
        assert rate == 1.0 and type(rate) is float

    def test_fields_cannot_be_set(self):
        config = load_config("astra_alpha")
        for part, name in ((config, "name"), (config.training, "state_dropout")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, name, 0.5)


@pytest.mark.parametrize("overrides, kept", [
    ({"name": "mine", "training.keep_epochs": True, "training.seed": 3}, True),
    ({"training.remat": True, "data.corpus": "tiny_shakespeare"}, True),
    ({"training.epochs": 10}, True), ({"training.epochs": 11}, False),
    ({"training.state_dropout": 0}, False), ({"data.batches": "streams"}, False),
    ({"data.corpus": "tiny_shakespeare.txt"}, False),
])  # fmt: skip
def test_published_results_are_of_a_text_and_a_recipe(overrides, kept):
    """No config has them, and a run that was lengthened does not."""
    found = published_losses(load_config("astra_alpha", overrides), RunInfo())
    expected = load_published("astra_alpha").train_loss if kept else None
    assert found.get("train_loss") == expected
    assert published_losses(load_config("astra_alpha"), RunInfo(lengthened=1)) == {}


class TestOverrides:
    @pytest.mark.parametrize("dotted, text, value", [
        ("training.epochs", "5", 5), ("training.epochs", "1_000", 1000),
        ("training.learning_rate", "1e-4", 1e-4), ("training.learning_rate", "1", 1.0),
        ("training.beta1", repr(1 - 2**-24), 1 - 2**-24),  # float32 has it below 1
        ("training.epsilon", "1e-30", 1e-30), ("model.cell", "gru", "gru"),
        ("model.final_norm", "True", True), ("model.second_bias", "false", False),
        ("data.corpus", "my text.txt", "my text.txt"), ("data.corpus", "true", "true"),
        ("data.corpus", "2024", "2024"),
    ])  # fmt: skip
    def test_are_read_as_typed(self, dotted, text, value):
        section, field = dotted.split(".")
        config = load_config("astra_alpha", typed(f"--{dotted}={text}"))
        seen = getattr(getattr(config, section), field)
        assert seen == value and type(seen) is type(value)

    def test_change_nothing_else(self):
        changed = load_config("astra_beta", {"training.seed": 3})
        again = dataclasses.replace(changed, training=dataclasses.replace(changed.training, seed=0))
        assert changed.training.seed == 3
        assert repr(again) == repr(load_config("astra_beta"))


REFUSED = [
    ("0 -3 2.5 many", "training.epochs training.steps_per_epoch training.batch_size "
     "training.gradient_accumulation training.sequence_length training.plateau_patience "
     "model.vocab_size model.embedding_dim model.hidden_dim model.num_layers model.num_blocks"),
    ("-1 2.5", "model.context_length model.rank model.proj_size data.min_count "
     "data.validation_seed training.warmup_steps training.patience training.seed"),
    ("1 1.0 -0.1 nan inf lots true", "training.input_dropout training.state_dropout "
     "training.between_dropout training.output_dropout training.weight_drop training.ema_decay "
     "training.reset_probability training.beta1 training.beta2 data.validation_fraction"),
    ("0 -1e-3 inf nan fast", "training.learning_rate training.epsilon training.max_grad_norm"),
    # too much, or not for this model
    (f"{2**31}", "model.vocab_size training.warmup_steps"), ("1024", "model.num_layers"),
    ("1024 7", "model.context_length"), ("1 2.5 4", "model.num_rounds"), ("3", "model.rank"),
    ("3", "model.num_blocks"), ("7", "model.proj_size"), ("true", "model.tied_embedding"),
    ("0 1 0.5", "training.plateau_factor"), ("2", "training.plateau_patience"),
    ("-0.01 inf", "training.weight_decay"), ("hex never Scan GRU", "data.encoding"),
    ("9" * 5000, "training.epochs"), ("1" + "0" * 400, "training.learning_rate"),
    (f"{2**32}", "training.seed"),
]  # fmt: skip
"""Values, and the fields that refuse each of them; flags and names are found by their types."""
BAD_VALUES: dict[str, list[str]] = {}
for bad, names in REFUSED:
    for name in names.split():
        BAD_VALUES.setdefault(name, [""]).extend(bad.split())
for section, cls in SECTIONS.items():
    for field in dataclasses.fields(cls):
        if field_types(cls)[field.name] is bool:
            BAD_VALUES.setdefault(f"{section}.{field.name}", [""]).extend(["1", "yes"])
        elif choices(cls, field):
            names = BAD_VALUES.setdefault(f"{section}.{field.name}", [""])
            names.extend(["never", "Scan", "GRU"])


class TestRefusals:
    def test_every_bounded_field_is_tried(self):
        """A field added later must be added here, unless any text will do for it."""
        free = ["data.corpus", "data.validation", "data.tokenizer_file", "data.separator"]
        free += ["training.init_from"]
        assert set(dotted_names()) - set(free) == set(BAD_VALUES)

    def test_every_field_of_a_model_is_used(self):
        """An option that no cell takes would be dropped in silence."""
        keywords = {key for cell in CELLS for key in options_of_cell(cell)}
        others = {"cell", "vocab_size", "embedding_dim", "hidden_dim", "num_layers", "final_norm"}
        others |= {"tied_embedding"}
        assert {field.name for field in dataclasses.fields(ModelConfig)} - others <= keywords

    @pytest.mark.parametrize("dotted", BAD_VALUES)
    def test_a_value_out_of_range_or_of_the_wrong_type(self, dotted, capsys):
        for text in BAD_VALUES[dotted]:
            with pytest.raises((ConfigError, SystemExit)) as refusal:
                load_config("astra_alpha", typed(f"--{dotted}={text}"))
            said = str(refusal.value) + capsys.readouterr().err
            wrong = ": (invalid |expected one|.* is neither)"
            wrong += "| is .*(must |no such option|only for)"
            assert re.search(f"{dotted}({wrong})", said)

    @pytest.mark.parametrize("set_dropout", [
        lambda rate: TrainingConfig(state_dropout=rate),
        lambda rate: dataclasses.replace(TrainingConfig(), state_dropout=rate),
        lambda rate: from_dict({"training": {"state_dropout": rate}}),
        lambda rate: load_config("leviathan", {"training.state_dropout": rate}),
    ])  # fmt: skip
    def test_whichever_way_a_value_is_set(self, set_dropout):
        says = "training.state_dropout is 1.0; it must be at least 0 and below 1."
        with pytest.raises(ConfigError, match=re.escape(says)):
            set_dropout(1.0)

    @pytest.mark.parametrize("name", ["training.learning_rate", "training.epochs"])
    @pytest.mark.parametrize("digits", [400, 5000])  # Python writes no more than 4,300
    def test_a_whole_number_of_any_length(self, name, digits):
        """Of a TOML file, which may write it in hexadecimal."""
        with pytest.raises(ConfigError, match=f"^{name} is .{{1,250}}; it must be") as refusal:
            load_config("astra_alpha", {name: 10**digits})
        assert str(refusal.value).isprintable()

    @pytest.mark.parametrize("overrides, says", [
        ({"model.num_layers": 1}, "between_dropout is 0.15, but it is only for more than"),
        ({"model.cell": "mlp", "model.context_length": 3,
          "model.init_scheme": "orthogonal"},
         "weight_drop is 0.3, but it is only for cells with recurrent matrices."),
        ({"data.batches": "crops"}, "random_offset is True, but it is only for streams"),
        ({"data.batches": "crops", "training.random_offset": False},
         "reset_probability is 0.25, but it is only for streams"),
        ({"model.cell": "gru", "model.layer_norm": True, "model.activation": "relu"},
         "activation must be 'tanh' with layer_norm; it is 'relu'."),
    ])  # fmt: skip
    def test_a_field_that_makes_no_sense_with_another(self, overrides, says):
        with pytest.raises(ConfigError, match=rf"^(training|model)\.{re.escape(says)}"):
            load_config("best_gru", overrides)

    @pytest.mark.parametrize("options, says", [
        ({"cell": "lstm", "second_bias": True}, "second_bias is True, but this cell is lstm"),
        ({"cell": "rnn", "reset_gate": "before"}, "reset_gate.*this cell is rnn"),
        ({"cell": "gru", "context_length": 1}, "context_length is 1, but this cell is gru"),
        ({"cell": "mlp"}, "context_length is 0; it must be at least 1.*this cell is mlp"),
        ({"cell": "min_gru", "activation": "relu"}, "is 'relu', .*--model.activation tanh"),
        ({"cell": "lstm", "second_bias": True, "reset_gate": "before"},
         "reset_gate is 'before' and model.second_bias is True, but .* lstm, .*; drop it"
         ", or give --model.reset_gate after --model.second_bias false"),
        ({"cell": "lstm", "proj_size": 9, "tied_embedding": True},
         "model.embedding_dim must be 9, the size of a layer's output, and not 64"),
    ])  # fmt: skip
    def test_options_belong_to_their_cells(self, options, says):
        with pytest.raises(ConfigError, match=says):
            ModelConfig(**options)

    @pytest.mark.parametrize("kind, file", [
        ("subwords", ""), ("sentencepiece", ""), ("bytes", ""), ("words", "words.json"),
    ])  # fmt: skip
    def test_a_count_belongs_to_words_or_characters_that_are_learned(self, kind, file):
        says = "data.min_count is 3; only a vocabulary of characters or words that is learned takes"
        with pytest.raises(ConfigError, match=says):
            DataConfig(tokenizer=kind, tokenizer_file=file, min_count=3)

    @pytest.mark.parametrize("given, says", [
        ("nowhere", f"there is no config 'nowhere'; .*{', '.join(config_names())}"),
        ("levithan", "no config 'levithan'; the nearest is leviathan."),
        ("configs/astra_alpha", "there is no config 'configs/astra_alpha'"),  # no .toml
        ("missing.toml", "missing.toml cannot be read: No such file"),
        ("folder.toml", "folder.toml cannot be read: Is a directory."),
    ])  # fmt: skip
    def test_a_config_that_is_not_there(self, given, says, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder.toml").mkdir()
        with pytest.raises(ConfigError, match=says):
            load_config(given)

    @pytest.mark.parametrize("table, says", [
        ({"model": {"hidden_dims": 3}}, "field 'model.hidden_dims'; .* is model.hidden_dim."),
        ({"training": {"learning-rate": 1.0}}, "the nearest is training.learning_rate."),
        ({"model": {"heads_of_it": 3}}, "'model.heads_of_it'; the fields are model.cell, "),
        ({"trainning": {}}, "no field 'trainning'; the nearest is training."),
        ({"hidden_dim": 3}, "no field 'hidden_dim'; the nearest is model.hidden_dim."),
        ({"model": [{"cell": "gru"}]}, "no field 'model'"),
        *(
            ({"name": name}, "name is .*; it names a folder")
            for name in ("", "..", "a/b", "a\\b", ".hidden", "-a", "a\n", "a b", 3, "x" * 201)
        ),
    ])  # fmt: skip
    def test_an_unknown_field_or_section_or_a_name_that_is_no_folders(self, table, says):
        with pytest.raises(ConfigError, match=says):
            from_dict(table)
        for dotted in ("training.epoch", "model", ""):
            with pytest.raises(ConfigError, match=repr(dotted)):
                load_config("astra_alpha", {dotted: 1})

    @pytest.mark.parametrize("data", [b"[model", b"[model]\ncell = ", b"\xff", b"a = 1\na = 2"])
    def test_a_file_that_is_not_toml(self, tmp_path, data):
        (tmp_path / "bad.toml").write_bytes(data)
        with pytest.raises(ConfigError, match=r"bad\.toml is not a TOML file"):
            load_config(tmp_path / "bad.toml")


def test_the_help_of_an_option_names_the_cells_that_have_it():
    """A new cell's options are documented without another line."""

    @register
    def init_of_ranks(key, in_features, hidden_dim, *, rank=1, dtype="float32"):
        raise NotImplementedError

    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    assert ModelConfig.help_of(fields["rank"]).startswith("mogrifier_gru, of_ranks: rank of ")
    assert ModelConfig.help_of(fields["num_layers"]) == "stacked layers"
