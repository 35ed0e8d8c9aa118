"""The command `jaxgru`: what it finds, what it says without a command, and without the extras."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys

import jax
import pytest
from conftest import Outcome

import jaxgru
from jaxgru.cli.command import COMMANDS
from jaxgru.errors import MissingPackage, needs
from jaxgru.lm.config import config_names


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs `jaxgru` with these arguments as its own process would, but in this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/jaxgru", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("jaxgru", run_name="__main__")
        return Outcome(stopped.value.code, *capfd.readouterr())

    return run


def test_help_has_a_line_per_command(run):
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    for name, line in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(line)}$", done.out, re.MULTILINE)


def test_version(run):
    done = run("--version")
    assert done.out.startswith(f"jaxgru {jaxgru.__version__}, JAX {jax.__version__}, Python 3.")
    assert run("version") == done


def test_help_is_a_word_too(run):
    assert run("help") == run("--help")
    assert run("help", "train", "leviathan") == run("train", "leviathan", "--help")


@pytest.mark.parametrize("words, says", [
    ("--verzion", ": there is no option --verzion; the nearest is --version."),
    ("trian --summary", ": there is no command trian; the nearest is train."),
    ("help me", ": there is no command me; the commands are train, sample, evaluate, convert, "
     "models, corpus, playground."),
    # the model that it takes where none is named
    ("sample --epoch best",
     " sample: astra_beta holds one model; only a run has a best epoch."),
    ("convert astra_beta a.onnx --epoch last",
     " convert: astra_beta holds one model; only a run has a last epoch."),
    ("convert nothing.pth a.onnx", " convert: there is no file nothing.pth."),
])  # fmt: skip
def test_a_mistake_is_one_line_and_2(run, words, says):
    assert run(*words.split()) == Outcome(2, "", f"jaxgru{says}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_of_the_command(run, name, monkeypatch):
    done = run(name, "--help")
    assert (done.code, done.err) == (0, "") and done.out.startswith(f"usage: jaxgru {name} ")
    examples = done.out.partition("\nexamples:\n")[2].splitlines()
    assert examples and all(line.startswith(f"  jaxgru {name}") for line in examples)
    assert max(map(len, done.out.splitlines())) <= 80
    monkeypatch.setenv("FORCE_COLOR", "1")  # for a terminal, the same in colour
    coloured = run(name, "--help").out
    assert coloured != done.out and re.sub(r"\x1b\[[\d;]*m", "", coloured) == done.out


def test_alone_it_prints_its_help(run):
    assert run() == run("--help")


def test_models_lists_every_config(run):
    done = run("models")
    assert (done.code, done.err) == (0, "")
    head, *lines = done.out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == config_names()
    assert lines[0] == "astra_alpha      86,913   1.66   2.60  a first run: it trains in minutes"
    assert "leviathan    24,248,129      –      –  the study's" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


class TestCompletion:
    def test_scripts_name_fields_configs_and_models(self, run):
        for shell in ("bash", "zsh", "fish"):
            done = run("--print-completion", shell)
            assert (done.code, done.err) == (0, "")
            for word in ("--training.learning_rate", "astra_gamma", "scribe_alpha", "evaluate"):
                assert word.lstrip("-") in done.out

    @pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
    def test_in_bash(self, run, tmp_path):
        (tmp_path / "tiny.safetensors").touch()
        (tmp_path / "completion").write_text(run("--print-completion", "bash").out)
        code = (
            "source completion; COMP_WORDS=($1); [[ $1 = *\\  ]] && COMP_WORDS+=('');"
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1));"
            "$(complete -p jaxgru | sed 's/.*-F //; s/ .*//');"
            'echo "${COMPREPLY[*]}"'
        )
        for words, completed in (
            ("jaxgru tr", "train"),
            ("jaxgru train --training.learn", "--training.learning_rate"),
            ("jaxgru train astra_g", "astra_gamma"),
            ("jaxgru train --model.reset_gate ", "before after"),
            ("jaxgru sample as", "astra_alpha astra_beta astra_gamma"),
            ("jaxgru convert astra_beta tiny.s", "tiny.safetensors"),
        ):
            done = subprocess.run(
                ["bash", "-c", code, "bash", words], capture_output=True, text=True, cwd=tmp_path
            )
            assert done.stdout == f"{completed}\n", done.stderr


CORE = """
import runpy, sys
for name in ("optax", "orbax", "matplotlib", "msgspec", "rich", "rich_argparse", "sentencepiece",
             "shtab", "flax", "torch", "onnx"):
    sys.modules[name] = None  # as if it were not installed
import jax, jaxgru

x = jax.numpy.ones((2, 3, 4))
jaxgru.unroll(jaxgru.init_gru(jax.random.key(0), 4, 5), x)
params, config, tokenizer = jaxgru.lm.load("elman_alpha")
jaxgru.lm.generate(params, jax.random.key(0), jax.numpy.zeros((1, 2), int), 3)
for path in ("run", "scribe.pth", "scribe.onnx"):
    try:
        jaxgru.lm.load(path)
    except ImportError as error:
        print(error, file=sys.stderr)
    except jaxgru.UserError as error:
        print(error, file=sys.stderr)
for arguments in (
    "convert elman_alpha elman.safetensors", "sample elman.safetensors",
    "convert elman_alpha elman.onnx", "models",
    "corpus --corpus text.txt", "sample scribe_alpha", "sample run",
    "sample elman_alpha --compare", "evaluate elman_alpha",
    "train --config astra_alpha", "--print-completion bash",
):
    sys.argv = ["jaxgru", *arguments.split(), *["--num-tokens=3"] * arguments.startswith("sample")]
    try:
        runpy.run_module("jaxgru", run_name="__main__")
    except SystemExit as stop:
        print(stop.code, arguments, file=sys.stderr)
"""


def test_without_the_extras(tmp_path, tiny_run):
    """What needs none of them works; what does names the command that installs it."""
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "text.txt").write_text("But soft")
    (tmp_path / "scribe.pth").touch()
    done = subprocess.run(
        [sys.executable, "-c", CORE], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    how = 'run pip install -e ".[{}]" in a checkout of jaxgru.'
    needed = f"{{}} is needed but not installed; {how}".format
    lines = done.stderr.splitlines()
    assert lines == [
        needed("optax", "train"),
        "PyTorch is needed but not installed; run pip install torch.",
        needed("onnx", "onnx"),
        "0 convert elman_alpha elman.safetensors",
        "0 sample elman.safetensors",
        f"jaxgru convert: {needed('onnx', 'onnx')}",
        "2 convert elman_alpha elman.onnx",
        "0 models",
        "0 corpus --corpus text.txt",
        f"jaxgru sample: {needed('sentencepiece', 'train')}",
        "2 sample scribe_alpha",
        f"jaxgru sample: {needed('optax', 'train')}",
        "2 sample run",
        f"jaxgru sample: {needed('rich', 'train')}",
        "2 sample elman_alpha --compare",
        f"jaxgru evaluate: {needed('msgspec', 'train')}",
        "2 evaluate elman_alpha",
        f"jaxgru train: {needed('rich', 'train')}",
        "2 train --config astra_alpha",
        f"jaxgru: {needed('shtab', 'completion')}",
        "2 --print-completion bash",
    ]


def test_an_import_of_our_own_that_fails_is_no_missing_package():
    with pytest.raises(ModuleNotFoundError) as raised, needs("train"):
        import jaxgru.nothing  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert not isinstance(raised.value, MissingPackage)
