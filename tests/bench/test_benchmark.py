"""The benchmark: what it computes, times, keeps and writes; not how fast anything is."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import slow
from msgspec.structs import replace as changed

import benchmark
from bench import benchmark_page, benchmark_records, layers, timing
from bench import contestants as peers
from bench.benchmark_records import BenchmarkRun, Benchmarks, ContestantTime
from bench.cells import CELLS
from bench.contestants import CONTESTANTS
from bench.timing import Contestant, LayerTask, PPOTask, Started, Task, measure, start
from jaxgru import UserError
from jaxgru.layers import implementations
from jaxgru.lm.config import Config, ModelConfig, TrainingConfig

TINY = Config(
    "tiny",
    ModelConfig("gru", 11, 5, 9, 2, second_bias=True, reset_gate="before"),
    training=TrainingConfig(batch_size=4, sequence_length=6, state_dropout=0.1),
)
NOW = "2026-02-03T04:05:06"
EARLIER = "2026-01-01T00:00:00"
OLD = "2025-01-01T00:00:00"


class TestTiming:
    def test_in_turn(self):
        """On a clock that only calls move, each contestant's next costs, one a call of `run`."""
        now = 0.0
        log = []

        def contestant(name, costs):
            def run(calls):
                nonlocal now
                log.append((name, calls))
                now += calls * next(costs)

            return Contestant(run)

        costs = {"a": [9.0, 2.0, 3.0, 1.0, 8.0], "b": [0.5, 0.02, 0.01, 0.03, 0.02]}
        clock = lambda: now
        started = {
            name: start(partial(contestant, name, iter(values)), clock)
            for name, values in costs.items()
        }
        assert started["a"].compile_seconds == 7.0
        assert started["b"].compile_seconds == pytest.approx(0.48)
        log.clear()
        seconds = measure(started, 3, 0.05, clock)
        assert log == [("a", 1), ("b", 3)] * 3  # 3 calls of 0.02 s reach 0.05
        assert seconds["a"] == pytest.approx(costs["a"][2:])
        assert seconds["b"] == pytest.approx(costs["b"][2:])

    def test_compiling_timed_apart_is_believed(self):
        assert Started(Contestant(lambda n: None, 5.0), 1.0, 0.5).compile_seconds == 5.0
        assert Started(Contestant(lambda n: None), 0.5, 0.6).compile_seconds == 0.0


def record(contestant: str, median: float, run: str = NOW, kind: str = "training", **more):
    """A record of TINY, of 1000 s compiling; more: fields to replace."""
    time = ContestantTime(
        run=run,
        config="tiny",
        kind=kind,
        batch_size={"sampling_1": 1, "sampling_64": 64}.get(kind, 4),
        num_tokens=6,
        precision="float32",
        contestant=contestant,
        median=median,
        min=median / 2,
        max=median * 2,
        compile_seconds=1000.0,
    )
    return changed(time, **more)


def about(hardware: str = "a machine") -> BenchmarkRun:
    return BenchmarkRun(
        hardware=hardware,
        command="python scripts/benchmark.py",
        versions={"jax": "0.1"},
        rounds=3,
        note="torch uses 2 threads.",
    )


class TestRecords:
    def test_new_ones_replace_the_same_and_no_others(self, tmp_path):
        nothing = benchmark_records.load(tmp_path / "none.json")
        old = [
            record("jaxgru", 1.0, EARLIER),
            record("haiku", 2.0, EARLIER),
            record("jaxgru", 3.0, EARLIER, config="other"),
            record("jaxgru", 4.0, EARLIER, kind="forward"),
            record("jaxgru", 5.0, EARLIER, batch_size=8),
            record("jaxgru", 6.0, EARLIER, precision="tf32"),
        ]
        data = nothing.merged(EARLIER, about(), old)
        assert data.records == old
        new = data.merged(NOW, about(), [record("jaxgru", 7.0)])
        assert [r.median for r in new.records] == [7.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert list(new.runs) == [EARLIER, NOW]
        elsewhere = data.merged(NOW, about("another machine"), [record("jaxgru", 7.0)])
        assert [r.median for r in elsewhere.records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        alone = Benchmarks().merged(EARLIER, about(), [record("nnx", 1.0, EARLIER)])
        assert list(alone.merged(NOW, about(), [record("nnx", 2.0)]).runs) == [NOW]

        benchmark_records.save(tmp_path / "some.json", new)
        assert benchmark_records.load(tmp_path / "some.json") == new

        (tmp_path / "x.json").write_text('{"records": [{"run": "x"}], "runs": {}}')
        with pytest.raises(UserError, match="is not a file of measurements"):
            benchmark_records.load(tmp_path / "x.json")


class TestPage:
    def test_rows(self):
        """6 tokens a row in 2 ms: 333 µs per token; of 64 rows 192,000 tokens/s."""
        both = [record("jaxgru", 0.002), record("haiku", 0.005)]
        assert benchmark_page.rows(both) == [
            ["jaxgru", "2.00", "1.00 … 4.00", "1.00", "1000.0 s"],
            ["haiku", "5.00", "2.50 … 10.0", "2.50", "1000.0 s"],
        ]
        (row,) = benchmark_page.rows([record("nnx", 0.002, kind="sampling_1")])
        assert row[1:4] == ["333", "167 … 667", "–"]
        (row,) = benchmark_page.rows([record("nnx", 0.002, kind="sampling_64")])
        assert row[1:3] == ["192,000", "96,000 … 384,000"]

    def test_all_of_it(self, tmp_path, drawn):
        """Each table is of the machine that measured jaxgru last; without jaxgru, there is none.

        Its columns are who was measured in turn with jaxgru, and has a label.
        """
        now = [
            record("jaxgru", 0.002),
            record("nnx", 0.003),
            record("haiku", 1, kind="forward"),
            record("jaxgru", 0.1, kind="sampling_1"),
            record("jaxgru", 0.1, kind="resets"),
            record("equinox", 0.2, kind="resets"),
            record("jaxgru", 2.0, kind="ppo_8"),
            record("linen", 3.0, kind="ppo_8"),
            record("jaxgru", 5e-5, kind="step"),
            record("linen", 4e-5, kind="step"),
        ]
        apart = record("haiku", 0.004, EARLIER)  # on the same machine, but not in turn
        data = Benchmarks().merged(EARLIER, about(), [apart]).merged(NOW, about(), now)
        old = [record("jaxgru", 0.1, OLD), record("jaxgru", 0.1, OLD, precision="tf32")]
        data = data.merged(OLD, about("a GPU"), old)
        benchmark_page.write(tmp_path, data)
        page = (tmp_path / "performance.md").read_text()
        assert [line for line in page.splitlines() if line.startswith("| ")] == [
            "|  | jaxgru | Flax Linen |",
            "| --- | ---: | ---: |",
            "| tiny, 4 × 6, 8 seeds at once | 2,000 ms | 1.50× |",
            "|  | jaxgru | Flax NNX |",
            "| --- | ---: | ---: |",
            "| training step, tiny, 4 × 6 | 2.00 ms | 1.50× |",
            "| writing one text, tiny | 16,667 µs per token | – |",
            "|  | jaxgru |",
            "| --- | ---: |",
            "| training step, tiny, 4 × 6 | 100 ms |",
            "|  | jaxgru | Equinox |",
            "| --- | ---: | ---: |",
            "| tiny, 4 × 6 | 100 ms | 2.00× |",
            "|  | jaxgru | Flax Linen |",
            "| --- | ---: | ---: |",
            "| tiny, 4 rows | 50.0 µs | 0.80× |",
        ]
        figure = (tmp_path / "figures" / "speed.svg").read_text()
        assert ">1 (2 ms)</text>" in figure and ">1.50</text>" in figure  # times, jaxgru's is 1

    def test_by_size(self):
        """A ratio below 1 is bold; a size that was not measured has a dash."""
        ratios = {("LSTM, H 32", 1): 2.0, ("LSTM, H 64", 1): 0.5, ("LSTM, H 64", 4): 1.0}
        times = []
        for (config, rows), ratio in ratios.items():
            task = {"kind": "layer", "config": config, "batch_size": rows}
            times += [record("jaxgru", 1.0, **task), record("autodiff", ratio, **task)]
        data = Benchmarks().merged(NOW, about(), times)
        assert benchmark_page.by_size(data, "autodiff").splitlines() == [
            "a machine; T = 6; medians of 3 rounds. 1 of 3 ratios are below 1; the median is 1.00.",
            "",
            "| cell | rows | H 32 | H 64 |",
            "| --- | ---: | ---: | ---: |",
            "| LSTM | 1 | 2.00 | **0.50** |",
            "| LSTM | 4 | – | 1.00 |",
        ]
        assert benchmark_page.by_size(data, "torch.nn") == ""


MODELS = [
    pytest.param(name, marks=() if name in ("jaxgru", "torch.nn") else pytest.mark.slow)
    for name, entry in CONTESTANTS.items()
    if entry.model and name != "wavefront"
]
LAYERS = [name for name, entry in CONTESTANTS.items() if "resets" in entry.kinds]


class TestContestants:
    @pytest.mark.parametrize("name", MODELS)
    def test_trains(self, name):
        """From about log V; the tokens being random, there is nothing more to be learnt."""
        assert peers.why_absent(name) is None
        torch.manual_seed(0)  # of batches and dropout
        contestant = peers.build(name, Task(TINY, "training", 4, 6), "float32")
        first = float(contestant.run(1))
        last = float(contestant.run(20))
        assert np.log(11) / 2 < first < 2 * np.log(11)
        assert last < first + 0.1

    @pytest.mark.parametrize("name", ["torch.nn", "haiku", "nnx"])
    def test_other_cells(self, name):
        config = replace(TINY, model=ModelConfig("lstm", 11, 5, 9, 2, final_norm=True))
        logits = peers.build(name, Task(config, "forward", 4, 6), "float32").run(1)
        assert logits.shape == (4, 6, 11) and np.isfinite(np.asarray(logits)).all()

    def test_plain_scan_is_another_program_of_the_same_numbers(self, monkeypatch, forget_traces):
        task = Task(TINY, "forward", 4, 6)
        plain = peers.build("autodiff", task, "float32")
        ours = peers.build("jaxgru", task, "float32")
        np.testing.assert_allclose(plain.run(1), ours.run(1), rtol=1e-4, atol=1e-5)

        def no_unroll(*arguments, **options):
            raise AssertionError("the fast unroll was traced")

        forget_traces()
        monkeypatch.setattr(implementations, "over_time", no_unroll)
        peers.build("autodiff", task, "float32")
        with pytest.raises(AssertionError, match="fast unroll"):
            peers.build("jaxgru", task, "float32")

    @pytest.mark.parametrize("name", ["jaxgru", *slow("haiku", "linen", "nnx", "equinox")])
    def test_layers_with_resets(self, name):
        """After a reset, outputs are those of a sequence that begins there."""
        task = LayerTask("resets", "GRU, reset before" if name == "haiku" else "GRU", 2, 3, 5)
        layer = getattr(layers, f"{name}_layer")(task)
        x = jax.random.normal(jax.random.key(0), (5, 2, 3))
        reset = jnp.zeros((5, 2), bool).at[2].set(True)
        y = layer.apply(layer.params, x, reset)
        expected = layer.apply(layer.params, x[2:], reset[3:].repeat(2, 0)[:3])
        np.testing.assert_allclose(y[2:], expected, rtol=1e-5, atol=1e-6)
        without = layer.apply(layer.params, x, jnp.zeros((5, 2), bool))
        assert np.abs(without[2:] - expected).max() > 1e-3

    @pytest.mark.parametrize(
        "name, what, cell",
        [("jaxgru", "layer", cell) for cell in CELLS]
        + [("torch.nn", "layer", "LSTM"), *slow(*((name, "resets", "LSTM") for name in LAYERS))],
    )
    def test_layers(self, name, what, cell):
        """The gradient of x has its shape."""
        result = peers.build(name, LayerTask(what, cell, 2, 4, 5), "float32").run(1)
        if name != "torch.nn":
            _, of_x = result
            assert of_x.shape == (5, 2, 4) and np.abs(of_x).min() > 0

    def test_who_has_which_layer(self):
        tasks = [task for task in timing.LAYER_TASKS if task.hidden_dim == 64]
        measured = {n: {(t.what, t.cell) for t in tasks if peers.is_measured(n, t)} for n in LAYERS}
        gru, before, lstm = (("resets", cell) for cell in ("GRU", "GRU, reset before", "LSTM"))
        assert measured["haiku"] == {before, lstm}
        assert measured["linen"] == measured["equinox"] == {gru, lstm, ("step", "GRU")}
        assert measured["jaxgru"] - measured["autodiff"] == {("step", "GRU")}
        assert len(measured["autodiff"]) == len(CELLS) + 3

    @pytest.mark.parametrize("name", ["jaxgru", *slow("linen", "nnx", "equinox")])
    def test_one_step_is_the_layer_s_first(self, name):
        task = LayerTask("step", "GRU", 2, 4, 1)
        layer = getattr(layers, f"{name}_layer")(task)
        carry, y = peers.build(name, task, "float32").run(1)
        x = np.random.default_rng(0).normal(size=(1, 2, 4)).astype("f4")
        expected = layer.apply(layer.params, x, jnp.zeros((1, 2), bool))[0]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(carry, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("seeds", [1, 2])
    def test_ppo_learns_the_same(self, seeds):
        """With Flax's cell as with ours, and each seed as it does alone."""
        task = PPOTask(4, 1, seeds, num_tokens=80, updates=3)
        ours, theirs = (peers.build(n, task, "float32").run(1) for n in ("jaxgru", "linen"))
        assert ours.shape == ((3,) if seeds == 1 else (2, 3)) and np.ptp(ours) > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert not peers.is_measured("haiku", task)

    def test_samplers_give_tokens(self):
        task = Task(TINY, "sampling", 3, 4)
        shapes = {"torch.nn": (3, 4), "haiku": (4, 3, 1), "nnx": (4, 3, 1)}
        for name, shape in shapes.items():
            result = peers.build(name, task, "float32").run(1)
            tokens = np.asarray(result[0] if "torch" in name else result)
            assert tokens.shape == shape and ((0 <= tokens) & (tokens < 11)).all()

    def test_absent_ones_are_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "haiku", None)
        assert peers.why_absent("haiku").startswith("haiku cannot be imported")
        assert peers.why_absent("jaxgru") is None
        assert peers.why_absent("wavefront") == "it is for GPUs"

    @pytest.mark.parametrize(
        "name, task, precision, says",
        [
            ("wavefront", Task(TINY, "forward", 4, 6), "float32", "cannot run at once over 6"),
            ("haiku", Task(TINY, "forward", 4, 6), "bfloat16", "in float32 only"),
            ("nnx", LayerTask("resets", "LSTM", 2, 4, 5), "bfloat16", "in float32 only"),
            ("autodiff", Task(TINY, "sampling", 4, 6), "float32", "no such sampling"),
            ("torch.nn", LayerTask("resets", "LSTM", 2, 4, 5), "float32", "no such resets"),
        ],
    )
    def test_who_cannot_says_so(self, name, task, precision, says):
        with pytest.raises(UserError, match=says):
            peers.build(name, task, precision)


class TestScript:
    @pytest.mark.parametrize(
        "options, says",
        [
            ("--configs astra_delta", "there is no config 'astra_delta'"),
            (
                "--configs bengio_mlp",
                "bengio_mlp: only GRUs, LSTMs and RNNs with tanh are",
            ),
            ("--only keras", "argument --only: invalid choice: 'keras'"),
            ("--what resting", "argument --what: invalid choice: 'resting'"),
            ("--precision tf32", "--precision tf32 needs a GPU; a CPU has float32 and"),
            ("--repeats 0", "--repeats is 0; it must be at least 1"),
            ("--what ppo step", "--what layer resets step: they run on one core, without the"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, script, monkeypatch, options, says):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which is restored after it
        done = script("benchmark", *options.split())
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"benchmark.py: {says}") and done.err.count("\n") == 1

    @pytest.fixture
    def fake(self, monkeypatch, tmp_path):
        """Runs main with contestants that take no time, in tmp_path; build: another one."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.cores = []
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: self.cores.append(cores))
        monkeypatch.setattr(jax.config, "update", lambda name, value: None)
        monkeypatch.setattr(benchmark.signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(benchmark.gc, "collect", lambda: None)

        def main(*options: str, build=lambda *_: Contestant(lambda calls: None)) -> None:
            monkeypatch.setattr(benchmark, "build", build)
            monkeypatch.setattr(sys, "argv", ["benchmark.py", "--quick", *options])
            benchmark.main()

        return main

    def kept(self, folder, *fields: str) -> list[tuple]:
        data = json.loads((folder / "benchmarks.json").read_text())
        return [tuple(r[field] for field in fields) for r in data["records"]]

    def test_interrupted_it_writes_what_it_has(self, fake, tmp_path, capsys):
        """And a contestant that fails is said, and the others are measured."""

        def build(name, task, precision):
            if task.what == "forward":
                raise KeyboardInterrupt
            if name == "haiku":
                raise RuntimeError("of no use\nat all")
            return Contestant(lambda calls: None)

        with pytest.raises(KeyboardInterrupt):
            options = ["--configs", "astra_alpha", "--only", "nnx", "haiku", "jaxgru"]
            fake(*options, "--docs", "here", build=build)
        assert self.kept(tmp_path / "here", "kind", "contestant") == [
            ("training", "jaxgru"),
            ("training", "nnx"),
        ]
        page = (tmp_path / "here" / "performance.md").read_text()
        line = r"\| training step, .*\(astra_alpha\), 64 × 128 \| .* ms \| .*× \|$"
        assert re.search(line, page, re.M)
        assert "haiku failed: RuntimeError: of no use\n" in capsys.readouterr().out

    def test_configs_take_turns(self, fake, tmp_path):
        """Whatever the time is enough for, each config has some of it, in the order asked for."""
        options = ["--what", "forward", "--only", "jaxgru", "--precision", "bfloat16", "float32"]
        fake("--configs", "astra_beta", "astra_alpha", *options, "--docs", "here")
        assert self.kept(tmp_path / "here", "precision", "config") == [
            ("bfloat16", "astra_beta"),
            ("bfloat16", "astra_alpha"),
            ("float32", "astra_beta"),
            ("float32", "astra_alpha"),
        ]

    def test_layers_are_measured_on_one_core(self, fake, tmp_path):
        fake("--what", "step", "--only", "jaxgru", "nnx", "--docs", "here")
        assert [len(cores) for cores in self.cores] == [1]
        assert len(self.kept(tmp_path / "here", "kind", "contestant")) == 2 * 4
        fake("--what", "forward", "--only", "jaxgru")
        assert len(self.cores) == 1

    def test_quick_writes_nothing_unless_told_where(self, fake, tmp_path):
        fake("--configs", "astra_alpha", "--what", "forward", "--only", "jaxgru")
        fake("--configs", "astra_alpha", "--what", "sampling", "--only", "autodiff")  # nobody
        assert list(tmp_path.iterdir()) == []
