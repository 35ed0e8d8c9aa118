"""The command line around the scripts: options, output that ends early, Ctrl-C, devices."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys

import jax
import pytest
from conftest import SCRIPTS, Outcome

import jaxgru
from jaxgru.cli.options import Parser, config_overrides, run_script, typed
from jaxgru.errors import UserError
from jaxgru.lm import config as configs
from jaxgru.lm.config import Config, ModelConfig, config_names, dotted_names, load_config
from jaxgru.lm.data.tokenizers import ByteTokenizer
from jaxgru.printing import warn


def parsed(*arguments, config="astra_alpha"):
    parser = Parser(None)
    parser.add_argument("--num-tokens", type=int)
    parser.add_config_fields(load_config(config))
    return parser.parse_args(list(arguments))


def test_dashes_and_underscores_are_the_same_in_names_and_not_in_values():
    for name in dotted_names():
        dashes = f"--{name.replace('_', '-')}"
        value = configs.field_value(Config(), name)
        for given in ([dashes, typed(value)], [f"{dashes}={typed(value)}"]):
            assert config_overrides(parsed(*given)) == {name: value}
    for option in ("--num-tokens", "--num_tokens"):
        assert parsed(option, "3").num_tokens == parsed(f"{option}=3").num_tokens == 3
    assert parsed("--data.corpus=--num_tokens").__dict__["data.corpus"] == "--num_tokens"


def test_a_unit_alone_has_escapes_typed_as_the_help_shows_them(tmp_path, capsys):
    text = r"a\r\n\t\\n"
    given = parsed(f"--data.separator={text}", f"--data.corpus={text}")
    assert config_overrides(given) == {"data.separator": "a\r\n\t\\n", "data.corpus": text}
    (tmp_path / "mine.toml").write_text(r'data.separator = "\n\n"')
    with pytest.raises(SystemExit):
        parsed("--help", config=tmp_path / "mine.toml")
    assert r"(default: '\n\n')" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["-5e-1", "-.5", "-1E3", "-inf", "-Inf", "-nan", "-2"])
def test_a_negative_number_is_a_value(value):
    parser = Parser(None)
    parser.add_argument("--penalty", type=float)
    for words in (["--penalty", value], [f"--penalty={value}"]):
        assert str(parser.parse_args(words).penalty) == str(float(value))


@pytest.mark.parametrize("name", config_names())
def test_the_defaults_that_help_shows_are_accepted_and_are_the_configs(name, monkeypatch, capsys):
    """Given as options to another config, they make this one of it."""
    monkeypatch.setenv("COLUMNS", "1000")
    config = load_config(name)
    with pytest.raises(SystemExit):
        parsed("--help", config=name)
    line = r"--(\w+\.\w+) (?:INT|FLOAT|TEXT|NAME|\{.*\})\s+.*\(default: (.*)\)\n"
    shown = dict(re.findall(line, capsys.readouterr().out))
    assert list(shown) == [name for name in dotted_names() if name != "training.init_from"]
    options = [f"--{dotted}={''.join(shlex.split(text))}" for dotted, text in shown.items()]
    other = "leviathan" if name == "astra_alpha" else "astra_alpha"
    made = load_config(other, config_overrides(parsed(*options)))
    assert dataclasses.replace(made, name=name) == config


@pytest.mark.parametrize("name, words, says", [
    ("train", "--learning-rate 1",
     "there is no option --learning-rate; the nearest is --training.learning_rate."),
    ("train", "--model.hiden_dim=3",
     "there is no option --model.hiden_dim; the nearest is --model.hidden_dim."),
    ("train", "--lr 1", "there is no option --lr; --help lists the options."),
    ("train", "leviatan", "there is no config 'leviatan'; the nearest is leviathan."),
    ("train", "my.toml", "my.toml cannot be read: No such file or directory."),
    ("train", "runs", "runs is a folder, not a config; --resume resumes a run."),
    ("train", "m.onnx", "m.onnx is a model, not a config; --init trains it further."),
    ("train", "leviathan more", "unrecognized arguments: more"),
    ("train", "leviathan --config x", 
     "argument --config: not allowed with argument CONFIG"),
    ("train", "leviathan --distributed.timeout 0",
     "--distributed.timeout is 0; it must be a whole number from 1 to 1000000000."),
    ("sample", "--num-samples 0",
     "num_samples is 0; it must be a whole number from 1 to 4294967296."),
    ("train", "--resume=", "argument --resume: expected one argument, not an empty one"),
    ("train", "leviathan --data.corpus=",
     "data.corpus is ''; it must name a text, such as my_text.txt."),
    ("sample", "--epoch --compare", "argument --epoch: expected one argument"),
    ("sample", "--top-k hot", "argument --top-k: invalid int value: 'hot'"),
    ("sample", "--typical 2", "typical is 2.0; it must be a number above 0 and at most 1."),
    ("convert", "astra_beta", "the following arguments are required: OUT"),
    ("evaluate", "", "name a model, such as astra_beta or runs/NAME, or give --ngram N."),
])  # fmt: skip
def test_a_mistake_is_one_sentence(script, tmp_path, name, words, says):
    for folder in "runs", "leviathan":  # the second is a config all the same
        (tmp_path / folder).mkdir()
    assert script(name, *words.split()) == Outcome(2, "", f"jaxgru {name}: {says}\n")


MAINS = sorted(
    str(path.relative_to(SCRIPTS).with_suffix(""))
    for path in SCRIPTS.rglob("*.py")
    if "run_script(main)" in path.read_text()
)


def test_every_script_runs_by_run_script():
    here, maintained = ({path.stem for path in SCRIPTS.glob(f"{folder}*.py")}
                        for folder in ("", "maintain/"))  # fmt: skip
    assert here - set(MAINS) == {"__init__", "startup", "train"}  # modules, and a command
    maintained -= {"__init__"}
    assert {f"maintain/{name}" for name in maintained} <= set(MAINS)


@pytest.mark.parametrize("name", MAINS)
def test_every_script_has_a_help(name, script):
    done = script(name, "--help")
    assert (done.code, done.err) == (0, "") and "--help" in done.out


def process(*command, **env) -> subprocess.CompletedProcess[str]:
    environment = os.environ | env
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)


def ended(main) -> object:
    """The exit code with which `run_script` ends."""
    with pytest.raises(SystemExit) as stopped:
        run_script(main)
    return stopped.value.code


class TestOutput:
    def test_a_reader_that_has_gone_is_no_error(self, monkeypatch, capfd):
        """`jaxgru sample | head`: that is all."""
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert ended(lambda: print("text")) == 1
        assert capfd.readouterr().err == ""

    def test_a_full_disk_is_one_line(self, monkeypatch, capfd):
        """Python, which flushes at its end, has nothing to add."""
        monkeypatch.setattr(sys, "argv", ["jaxgru", "models"])
        with open("/dev/full", "w") as full, pytest.raises(SystemExit, match="2"):
            monkeypatch.setattr(sys, "stdout", full)
            runpy.run_module("jaxgru", run_name="__main__")
        assert capfd.readouterr().err == "jaxgru models: No space left on device.\n"

    @pytest.mark.parametrize("stderr", ["closed", "full"])
    def test_what_stderr_cannot_take_goes_nowhere(self, monkeypatch, capfd, stderr):
        """A mistake still exits with 2, and no warning is mixed into what is printed."""

        def main():
            warn("a warning")
            print("text")
            raise UserError("a mistake")

        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stderr", None if stderr == "closed" else full)
            warn("a warning")
            assert ended(main) == 2
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # it is flushed here
        assert capfd.readouterr() == ("text\n", "")

    def test_it_is_utf_8_so_no_character_is_lost(self, tmp_path, script, monkeypatch):
        """What a text has that is no UTF-8 passes as it is."""
        config = Config(model=ModelConfig(vocab_size=256, hidden_dim=3))
        params = jaxgru.lm.init(jax.random.key(0), config.model)
        text = "né 😀\udcff"
        jaxgru.lm.save(tmp_path / "m.safetensors", params, config, ByteTokenizer())
        (tmp_path / "bytes.txt").write_text(text, errors="surrogateescape")
        (tmp_path / "text.txt").write_text(text[:-1])
        for words, start, end in (
            ("evaluate m.safetensors --text bytes.txt --lines", "line,", f",{text}\n"),
            ("sample m.safetensors --prompt né😀", "né😀", "\n"),
            ("sample m.safetensors --prompts text.txt", '{"line": 1, "prompt": "né 😀"', "}\n"),
        ):
            out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
            monkeypatch.setattr(sys, "stdout", out)
            assert script(*words.split()) == Outcome(0, "", "")
            written = out.buffer.getvalue().decode(errors="surrogateescape")
            assert written.startswith(start) and written.endswith(end)
        words = "evaluate m.safetensors --text bytes.txt --lines --output table.csv"
        assert script(*words.split()).code == 0
        table = (tmp_path / "table.csv").read_text(errors="surrogateescape")
        assert table.endswith(f",{text}\n")


class TestInterrupts:
    def test_where_it_is_ignored_it_stays_so(self):
        """As under `nohup`, and behind a shell's "&"."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert ended(lambda: signal.raise_signal(signal.SIGINT)) == 0

    def test_no_exception_can_be_lost(self):
        """As one is that a callback of JAX's meets. What was printed is not lost, either."""
        code = (
            "import signal, sys; from jaxgru.cli.options import run_script\n"
            "def main():\n"
            "    print('text', end='')\n"
            "    try: signal.raise_signal(signal.SIGINT)\n"
            "    except BaseException: print('lost')\n"
            "run_script(main)\n"
        )
        done = process(sys.executable, "-c", code)
        assert (done.returncode, done.stdout, done.stderr) == (130, "text", "")


class TestMachine:
    def test_a_device_that_there_is_not(self):
        options = "train", "astra_alpha", "--data.corpus", __file__, "--runs", "/nowhere"
        done = process(sys.executable, "-m", "jaxgru", *options, JAX_PLATFORMS="nonsense")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "jaxgru train: JAX_PLATFORMS is 'nonsense', but JAX has no such device here; unset it, "
            "and JAX uses what is available.\n"
        )

    def test_too_little_memory_is_one_sentence(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["train.py"])
        assert ended(lambda: jax.numpy.zeros(2**46, "int8")) == 2
        assert capsys.readouterr().err.startswith(
            "train.py: out of memory (Out of memory allocating 70368744177664 bytes); to "
            "train in less, raise --training.gradient_accumulation"
        )

    @pytest.mark.parametrize(
        "error",
        [jax.errors.JaxRuntimeError("INTERNAL: a bug"), FileNotFoundError(2, "No such file", "x")],
    )
    def test_other_errors_are_nobodys_mistake(self, error):
        def fail():
            raise error

        with pytest.raises(type(error), match=re.escape(str(error))):
            run_script(fail)


def test_a_script_without_the_package_says_how_to_install_it():
    """-S: without the installed packages."""
    done = process(sys.executable, "-S", SCRIPTS / "train.py", "--help", PYTHONPATH="")
    said = "jaxgru is not installed; pip install -e '.[train,corpus]' does it.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
