"""How options are spelled, and what is said of one that there is not."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import Outcome

from jaxgru.command_line import Parser, config_overrides
from jaxgru.config import config_names, dotted_names, load_config

FIELDS = [name for name in dotted_names() if not name.startswith("published.")]


class TestSpelling:
    def parsed(self, *arguments):
        parser = Parser(None)
        parser.add_argument("--num-tokens", type=int)
        parser.add_argument("--prompt")
        parser.add_config_fields(load_config("astra_alpha"))
        return parser.parse_args(list(arguments))

    @pytest.mark.parametrize("name", FIELDS)
    def test_a_field_with_dashes_is_the_field(self, name):
        dashes = f"--{name.replace('_', '-')}"
        for given in ([dashes, "a_b-c"], [f"{dashes}=a_b-c"]):
            assert config_overrides(self.parsed(*given)) == {name: "a_b-c"}

    @pytest.mark.parametrize("option", ["--num-tokens", "--num_tokens"])
    def test_an_option_with_underscores_is_the_option(self, option):
        assert self.parsed(option, "3").num_tokens == self.parsed(f"{option}=3").num_tokens == 3

    @pytest.mark.parametrize("text", ["--num_tokens", "--num_tokens 3", "num_tokens"])
    def test_a_value_is_left_as_it_is(self, text):
        assert self.parsed(f"--prompt={text}").prompt == text

    def test_in_the_scripts(self, script, tiny_run):
        done = script("sample", "--run", tiny_run, "--num_tokens", 2, "--num_samples=2")
        assert done.code == 0 and done.out.count("--- sample") == 2
        done = script("train", "--config", "astra_alpha", "--training.steps-per-epoch", "none")
        assert done.code == 2 and "training.steps_per_epoch is 'none'" in done.err


@pytest.mark.parametrize("name", config_names())
def test_the_defaults_that_help_shows_are_accepted_and_are_the_configs(name, monkeypatch):
    """Given as options to another config, they make this one of it."""
    monkeypatch.setenv("COLUMNS", "1000")
    config = load_config(name)
    parser = Parser(None)
    parser.add_config_fields(config)
    shown = dict(re.findall(r"--(\w+\.\w+) VALUE\s+.*\(default: (.*)\)\n", parser.format_help()))
    overrides = {dotted: shlex.split(text) for dotted, text in shown.items()}
    assert list(overrides) == FIELDS
    other = "leviathan" if name == "astra_alpha" else "astra_alpha"
    made = load_config(other, {dotted: text for dotted, (text,) in overrides.items()})
    for section in ("model", "data", "training"):
        assert getattr(made, section) == getattr(config, section)


def refused(name, option, nearest):
    return Outcome(2, "", f"{name}.py: there is no option {option}; the nearest is {nearest}.\n")


class TestMeant:
    """An option that there is not: which one was probably meant."""

    @pytest.mark.parametrize(
        "given, meant",
        [
            ("--lr", "--training.learning_rate"),
            ("-lr", "--training.learning_rate"),
            ("--learning-rate", "--training.learning_rate"),
            ("--epochs", "--training.epochs"),
            ("--dropout", "--model.dropout"),
            ("--training.dropout", "--model.dropout"),
            ("--steps", "--training.steps_per_epoch"),
            ("--batch", "--training.batch_size"),
            ("--bs", "--training.batch_size"),
            ("--seq_len", "--training.sequence_length"),
            ("--layers", "--model.num_layers"),
            ("--hidden-size", "--model.hidden_dim"),
            ("--seed", "--training.seed"),
            ("--text", "--data.corpus"),
            ("--init", "--resume"),
            ("--checkpoint", "--resume"),
            ("--model", "--config"),
            ("--out", "--runs"),
        ],
    )
    def test_by_train(self, script, given, meant):
        for arguments in ([given, "1"], [f"{given}=1"]):
            done = script("train", "--config", "astra_alpha", *arguments)
            assert done == refused("train", given, meant)

    @pytest.mark.parametrize(
        "given, meant",
        [("--temp", "--temperature"), ("--max_new_tokens", "--num-tokens"), ("--topk", "--top-k"),
         ("--length", "--num-tokens"), ("--checkpoint", "--run"),
         ("--model", "--run"), ("--text", "--prompt")],
    )  # fmt: skip
    def test_by_sample(self, script, given, meant):
        done = script("sample", "--pretrained", "astra_alpha", given, "1")
        assert done == refused("sample", given, meant)


class TestStrayWords:
    @pytest.mark.parametrize(
        "name, options, word, meant",
        [
            ("train", [], "astra_alpha", "a config is given as --config astra_alpha"),
            ("train", ["--summary"], "my.toml", "a config is given as --config my.toml"),
            ("train", [], "nonsense", "--help lists the options"),
            ("train", [], "runs", "a run is given as --resume runs"),
            ("sample", ["--ngram", "3"], "astra_beta", "a config is given as --config astra_beta"),
            ("evaluate", ["--pretrained", "astra_alpha"], "more", "--help lists the options"),
            ("reproduce", [], "astra_alpha", "--help lists the options"),
        ],
    )
    def test_what_was_meant(self, script, tmp_path, name, options, word, meant):
        (tmp_path / "runs").mkdir()
        done = script(name, *options, word)
        says = f"{name}.py: {word!r} belongs to no option; {meant}.\n"
        assert done == Outcome(2, "", says)
