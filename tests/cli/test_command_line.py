"""The command line around the scripts: options, output that cannot be written, Ctrl-C, devices."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import ROOT, SCRIPTS, Outcome, slow

from jaxgru.cli.options import Parser, config_overrides, parse_fields, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import config_names, dotted_names, load_config
from jaxgru.parallel.processes import join


class TestSpelling:
    def parsed(self, *arguments):
        parser = Parser(None)
        parser.add_argument("--num-tokens", type=int)
        parser.add_argument("--prompt")
        parser.add_config_fields(load_config("astra_alpha"))
        return parser.parse_args(list(arguments))

    @pytest.mark.parametrize("name", dotted_names())
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
    line = r"--(\w+\.\w+) (?:INT|FLOAT|TEXT|\{.*\})\s+.*\(default: (.*)\)\n"
    shown = dict(re.findall(line, parser.format_help()))
    overrides = {dotted: shlex.split(text) for dotted, text in shown.items()}
    assert list(overrides) == [name for name in dotted_names() if name != "training.init"]
    other = "leviathan" if name == "astra_alpha" else "astra_alpha"
    made = load_config(other, parse_fields({name: text for name, (text,) in overrides.items()}))
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
            ("--dropout", "--training.dropout"),
            ("--model.dropout", "--training.dropout"),
            ("--steps", "--training.steps_per_epoch"),
            ("--batch", "--training.batch_size"),
            ("--bs", "--training.batch_size"),
            ("--seq_len", "--training.sequence_length"),
            ("--layers", "--model.num_layers"),
            ("--hidden-size", "--model.hidden_dim"),
            ("--seed", "--training.seed"),
            ("--text", "--data.corpus"),
            ("--finetune", "--init"),
            ("--checkpoint", "--resume"),
            ("--model", "--config"),
            ("--out", "--runs"),
            ("--training.lr", "--training.learning_rate"),
            ("--model.rnn_size", "--model.hidden_dim"),
            ("--model.lr", "--training.learning_rate"),
            ("--training.hidden", "--model.hidden_dim"),
            ("--data.text", "--data.corpus"),
            ("--model.n-layer", "--model.num_layers"),
            ("--model.layers", "--model.num_layers"),
            ("--training.droput", "--training.dropout"),
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

    @pytest.mark.parametrize("name", ["train", "sample", "evaluate"])
    @pytest.mark.parametrize("option", ["--foo", "--model.heads", "--training.heads", "--x.y"])
    def test_none_that_is_spelled_alike(self, script, name, option):
        """Then none is better than a wrong one."""
        said = f"{name}.py: there is no option {option}; --help lists the options.\n"
        assert script(name, "astra_alpha", option) == Outcome(2, "", said)


class TestStrayWords:
    @pytest.mark.parametrize(
        "name, words, says",
        [
            ("train", "leviatan", "there is no config 'leviatan'; the nearest is leviathan."),
            ("train", "my.toml", "there is no config file my.toml."),
            ("train", "runs", "runs is a folder, not a config; --resume resumes a run."),
            ("train", "m.onnx", "m.onnx is a model, not a config; --init trains it further."),
            ("train", "leviathan more", "'more' belongs to no option; --help lists the options."),
            ("train", "leviathan --config x",
             "argument --config: not allowed with argument CONFIG"),
            ("sample", "--ngram 3 astra_beta",
             "argument MODEL: not allowed with argument --ngram"),
            ("evaluate", "", "name a model, such as astra_beta or runs/NAME, or give --ngram N."),
            ("reproduce", "--all astra_alpha",
             "'astra_alpha' belongs to no option; --help lists the options."),
        ],
    )  # fmt: skip
    def test_what_was_meant(self, script, tmp_path, name, words, says):
        (tmp_path / "runs").mkdir()
        assert script(name, *words.split()) == Outcome(2, "", f"{name}.py: {says}\n")


MAINS = sorted(
    str(path.relative_to(SCRIPTS).with_suffix(""))
    for path in SCRIPTS.rglob("*.py")
    if re.search(r"run_script\(main\)|run_command\(", path.read_text())
)
OFTEN_RUN = ["train", "sample", "evaluate"]
SELDOM_RUN = slow(*(name for name in MAINS if name not in OFTEN_RUN))


def test_every_script_runs_by_run_script():
    here, maintained = ({path.stem for path in SCRIPTS.glob(f"{folder}*.py")}
                        for folder in ("", "maintain/"))  # fmt: skip
    assert here - set(MAINS) == {"__init__", "startup"}  # modules
    maintained -= {"__init__"}
    assert {f"maintain/{name}" for name in maintained} <= set(MAINS)


def process(*command, env=(), **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | dict(env)
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, **options
    )


class TestOutput:
    """What cannot be written, or not in the terminal's encoding."""

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
    @pytest.mark.parametrize(
        "name, options",
        [
            ("train", ["--help"]),
            ("train", ["--config", "leviathan", "--summary"]),
            ("sample", ["--num-tokens", 5, "--run"]),
            ("sample", ["--num-tokens", 5, "--compare", "--run"]),
            ("evaluate", ["--help"]),
        ],
    )
    @pytest.mark.parametrize("buffered", [True, False])
    def test_on_a_full_disk_it_is_one_sentence(
        self, script, tiny_run, monkeypatch, name, options, buffered
    ):
        with open("/dev/full", "wb", buffering=0) as raw:
            buffer = io.BufferedWriter(raw) if buffered else raw
            stream = io.TextIOWrapper(buffer, write_through=not buffered)
            monkeypatch.setattr(sys, "stdout", stream)
            done = script(name, *options, *[tiny_run] * ("--run" in options))
        says = f"{Path(name).name}.py: the output cannot be written: No space left on device.\n"
        assert (done.code, done.err) == (1, says)

    def test_a_file_that_has_become_a_pipe(self, tmp_path, monkeypatch):
        """As after os.dup2; Python asks it where it stands before it changes its encoding."""
        with open(tmp_path / "file", "w") as stream:
            reader, writer = os.pipe()
            os.dup2(writer, stream.fileno())
            os.close(writer)
            monkeypatch.setattr(sys, "stdout", stream)
            with pytest.raises(SystemExit, match="0"):
                run_script(lambda: print("all of it"))
        with open(reader) as pipe:
            assert pipe.read() == "all of it\n"

    def test_another_files_error_is_not_the_outputs(self):
        with pytest.raises(OSError, match="No space left"):
            run_script(lambda: open("/dev/full", "w").write("much" * 10000))

    @pytest.mark.parametrize(
        "closed, options, code, says",
        [
            (">&-", ["--nonsense"], 2, "train.py: there is no option --nonsense; .*\n"),
            *slow(
                (">&-", ["--config", "astra_alpha", "--summary"], 0, ""),
                ("<&- >&- 2>&-", ["--nonsense"], 2, ""),
            ),
        ],
    )
    def test_into_closed_streams_it_is_silent(self, closed, options, code, says):
        command = [sys.executable, SCRIPTS / "train.py", *options]
        done = process("sh", "-c", f'exec "$@" {closed}', "sh", *command)
        assert done.returncode == code
        assert re.fullmatch(says, done.stderr)

    def test_no_file_gets_the_number_of_a_closed_stream(self, tmp_path):
        """What C libraries print to descriptor 1 or 2 would be written into it."""
        (tmp_path / "jaxgru").write_text(
            "import jaxgru, os, sys\n"
            "with open(sys.argv[1], 'w') as file:\n"
            "    os.write(1, b'lost'); os.write(2, b'lost'); print('lost', file=sys.stderr)\n"
            "    file.write(str(file.fileno()))\n"
        )
        command = [sys.executable, tmp_path / "jaxgru", tmp_path / "out.txt"]
        assert process("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command).returncode == 0
        assert int((tmp_path / "out.txt").read_text()) > 2

    def test_an_encoding_without_the_character(self, tmp_path, script, monkeypatch):
        (tmp_path / "text.txt").write_text("né – où\n" * 500)
        (tmp_path / "mine.toml").write_text(f"[data]\ncorpus = '{tmp_path / 'text.txt'}'\n")
        options = ["--ngram", 8, "--config", tmp_path / "mine.toml", "--num-tokens", 16]
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        done = script("sample", *options, "--prompt", "né – où\n", "--temperature", 0)
        assert (done.code, done.err) == (0, "")
        assert sys.stdout.buffer.getvalue() == b"n? ? o?\n" * 3 + b"\n"

    def test_that_encoding_in_a_process(self):
        command = [sys.executable, SCRIPTS / "train.py", "--config", "astra_alpha", "--summary"]
        done = process(*command, env={"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert "65?64" in done.stdout


class TestInterrupts:
    @pytest.mark.parametrize("name", ["jaxgru", *OFTEN_RUN, *SELDOM_RUN])
    def test_in_an_import_ends_in_silence(self, name, tmp_path):
        """Whichever of these it imports first sends the signal, and is not ready yet."""
        for module in ("jax", "rich"):
            (tmp_path / f"{module}.py").write_text("import signal; signal.raise_signal(2)\n")
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        program = [SCRIPTS / f"{name}.py"]
        if name == "jaxgru":
            program = ["-m", name]
        elif "/" in name:  # of a folder: these are run as modules
            program = ["-m", f"scripts.{name.replace('/', '.')}"]
        done = process(sys.executable, *program, env={"PYTHONPATH": path}, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")

    def test_in_main_exits_130(self, monkeypatch):
        handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as startup.py leaves it

        def main():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            signal.raise_signal(signal.SIGINT)

        try:
            with pytest.raises(SystemExit, match="130"):
                run_script(main)
        finally:
            signal.signal(signal.SIGINT, handler)

    def test_at_once_no_exception_can_be_lost(self):
        """As one is that a callback of JAX's meets. What was printed is not lost, either."""
        code = (
            "import signal, sys; from jaxgru.cli.options import run_script\n"
            "def main():\n"
            "    print('text', end='')\n"
            "    try: signal.raise_signal(signal.SIGINT)\n"
            "    except BaseException: print('lost')\n"
            "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
            "run_script(main, at_once=True)\n"
        )
        done = process(sys.executable, "-c", code)
        assert (done.returncode, done.stdout, done.stderr) == (130, "text", "")

    @pytest.mark.slow
    def test_where_it_is_ignored_it_stays_so(self, tmp_path):
        """As under `nohup`, and behind a shell's "&"."""
        (tmp_path / "jaxgru").write_text("import jaxgru, signal; signal.raise_signal(2)\n")
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, tmp_path / "jaxgru"]
        assert process(*command).returncode == 0
        assert process(*command[4:]).returncode == -signal.SIGINT


class TestDevices:
    @pytest.mark.parametrize(
        "platform, name, options",
        [
            ("cuda", "train", ["--config", "astra_alpha"]),
            *slow(
                ("cuda", "evaluate", ["--pretrained", "astra_alpha"]),
                ("nonsense", "sample", ["--pretrained", "astra_alpha"]),
            ),
        ],
    )
    def test_one_that_there_is_not(self, platform, name, options, tmp_path, shakespeare):
        if platform == "cuda" and jax.default_backend() == "gpu":
            pytest.skip("there is one")
        (tmp_path / "text.txt").write_text(shakespeare, newline="")
        env = {"JAX_PLATFORMS": platform, "JAXGRU_CORPUS": str(tmp_path / "text.txt")}
        script = [SCRIPTS / f"{name}.py"]
        if "/" in name:
            script = ["-m", f"scripts.{name.replace('/', '.')}"]
        done = process(sys.executable, *script, *options, env=env, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"{Path(name).name}.py: JAX_PLATFORMS is {platform!r}, but JAX has no "
        )
        assert done.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


class TestWaitingForOthers:
    """Of a run in several processes; that they find one another, test_scaling.py shows."""

    def command(self, tmp_path, process, seconds):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        given = {"coordinator": address, "processes": 3, "process": process, "timeout": seconds}
        options = [f"--distributed.{name}={value}" for name, value in given.items()]
        script = [sys.executable, str(SCRIPTS / "train.py"), "--config", "astra_alpha"]
        return address, [*script, "--runs", str(tmp_path), *options]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "number, others",
        [
            *slow((0, "processes 1 to 2 to connect to {}")),
            (2, "process 0 at {}, and for the others"),
        ],
    )
    def test_in_vain(self, number, others, tmp_path):
        address, command = self.command(tmp_path, number, 1)
        done = process(*command)
        assert (done.returncode, done.stdout) == (2, "")
        others = re.escape(others.format(address))
        waits, gives_up = done.stderr.splitlines()
        clock = r"\d\d:\d\d:\d\d"
        assert re.fullmatch(f"process {number} of 3 waits for {others}, until {clock}", waits)
        assert re.match(f"process {number} of 3 has waited 1 s for {others}; ", gives_up)
        assert "--distributed.timeout SECONDS" in gives_up
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupt_ends_it(self, tmp_path):
        _, command = self.command(tmp_path, 0, 86400)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
            assert "process 0 of 3 waits" in waiting.stderr.readline()
            waiting.send_signal(signal.SIGINT)
            assert waiting.stderr.read() == ""
        assert waiting.returncode == -signal.SIGINT

    @pytest.mark.parametrize(
        "given, says",
        [
            (("there:1", 2, 0), "process 0 of 2 waits for process 1 to connect to there:1, until "),
            (("there:1", 2, 1), "process 1 of 2 waits for process 0 at there:1, until "),
            ((None, None, None), "this process waits for the others of its run, until "),
        ],
    )
    def test_who_waits_for_whom(self, given, says, monkeypatch, capsys):
        """JAX has been told to come back later than we give up; then Ctrl-C is Python's again."""
        before, seen = signal.getsignal(signal.SIGINT), []
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda *given, **options: seen.append(options)
        )
        join(*given, seconds=70)
        assert capsys.readouterr().err.startswith(says)
        assert seen[0]["initialization_timeout"] > 70
        assert signal.getsignal(signal.SIGINT) is before

    @pytest.mark.parametrize("seconds", [0, -1, 86401])
    def test_a_timeout_out_of_range(self, seconds):
        with pytest.raises(UserError, match=f"timeout is {seconds} seconds; it must be"):
            join("there:1", 2, 0, seconds)


@pytest.mark.parametrize("name", MAINS)
def test_help_without_docstrings(name, monkeypatch, capsys):
    """As `python -OO` compiles a script."""
    path = SCRIPTS / f"{name}.py"
    code = compile(path.read_text(), path, "exec", optimize=2)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as stopped:
        exec(code, {"__name__": "__main__", "__file__": str(path), "__doc__": None})
    assert stopped.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_a_script_without_the_package_says_how_to_install_it():
    """-S: without the installed packages."""
    command = [sys.executable, "-S", SCRIPTS / "train.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS)
    said = "jaxgru is not installed; pip install -e '.[train,corpus]' does it.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
