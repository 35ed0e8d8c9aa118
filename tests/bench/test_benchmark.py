"""The benchmark: what it counts, times, keeps and writes; not how fast anything is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import python_script, slow
from msgspec.structs import replace as changed

import benchmark
from bench import benchmark_page
from bench import contestants as peers
from bench.benchmark_page import merge
from bench.contestants import CONTESTANTS
from bench.records import BenchmarkRun, Benchmarks
from bench.timing import (
    Contestant,
    LayerTask,
    PPOTask,
    Started,
    Task,
    Timing,
    TooSlow,
    jax_product,
    make_record,
    measure,
    operations_per_token,
    product_ceiling,
    start,
    tasks,
    time_limit,
)
from jaxgru import UserError
from jaxgru.layers import implementations
from jaxgru.lm import load_config
from jaxgru.lm.config import Config, ModelConfig, TrainingConfig
from jaxgru.lm.model import init, initial_carry, step
from jaxgru.parallel.hardware import peak_resident_bytes

TINY_TOML = """\
name = "tiny"
[model]
cell = "gru"
embedding_dim = 5
hidden_dim = 9
num_layers = 2
second_bias = true
reset_gate = "before"
[training]
batch_size = 4
sequence_length = 6
dropout = 0.1
"""
TINY = Config(
    "tiny",
    ModelConfig("gru", 11, 5, 9, 2, second_bias=True, reset_gate="before"),
    training=TrainingConfig(batch_size=4, sequence_length=6, dropout=0.1),
)
NOW, EARLIER = "2026-02-03T04:05:06", "2026-01-01T00:00:00"


class TestOperations:
    @pytest.mark.parametrize(
        "name, operations",
        [
            ("astra_alpha", 2 * (64 * 384 + 128 * 384 + 128 * 65)),
            ("astra_beta", 2 * ((128 + 256) * 768 + (256 + 256) * 768 + 256 * 65)),
            ("leviathan", 2 * ((768 + 1024) * 4096 + 2 * 2048 * 4096 + 1024 * 65)),
            ("elman_alpha", 2 * ((64 + 128) * 128 + 128 * 65)),
        ],
    )
    def test_a_token(self, name, operations):
        assert operations_per_token(load_config(name).model) == operations

    def test_of_tasks(self):
        config = load_config("astra_gamma")
        (training,), (forward,) = tasks(config, "training"), tasks(config, "forward")
        assert training.operations == 214_236_659_712  # the 1870 ms at 115 GFLOP/s
        assert forward.operations * 3 == training.operations
        one, many, most = tasks(config, "sampling")
        assert one.operations == one.num_tokens * 2 * 4_358_656
        assert many.operations == 64 * many.num_tokens * 2 * 4_358_656
        assert [t.kind for t in (training, forward, one, many, most)] == [
            "training", "forward", "sampling_1", "sampling_64", "sampling_512",
        ]  # fmt: skip

    def test_are_what_xla_counts(self):
        """A cell's step costs a few elementwise operations more, and an MLP is refused."""
        model = replace(TINY.model, vocab_size=300, embedding_dim=200, hidden_dim=100, num_layers=1)
        params = init(jax.random.key(0), model)
        tokens = np.zeros(7, np.int32)
        lowered = jax.jit(step).lower(params, tokens, initial_carry(params, 7))
        counted = lowered.cost_analysis()["flops"]
        assert 7 * operations_per_token(model) == pytest.approx(counted, rel=0.02)
        with pytest.raises(UserError, match="cell is mlp"):
            operations_per_token(load_config("bengio_mlp").model)


class FakeClock:
    """Seconds that pass only in calls: each contestant's next costs, one a call of `run`."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, costs: list[float]) -> Contestant:
        costs = iter(costs)

        def run(calls: int) -> None:
            self.log.append((name, calls))
            self.now += calls * next(costs)

        return Contestant(run)


class TestTiming:
    def test_in_turn_with_median_and_spread(self):
        clock = FakeClock()
        costs = {"a": [9.0, 2.0, 3.0, 1.0, 8.0], "b": [0.5, 0.02, 0.01, 0.03, 0.02]}
        started = {
            name: start(lambda name=name: clock.contestant(name, costs[name]), clock)
            for name in costs
        }
        assert started["a"].compile_seconds == 7.0
        assert started["b"].compile_seconds == pytest.approx(0.48)
        clock.log.clear()
        seen = []
        timings = measure(started, 3, 0.05, clock, lambda *what: seen.append(what))
        assert clock.log == [("a", 1), ("b", 3)] * 3  # 3 calls of 0.02 s reach 0.05
        assert seen == [(name, i) for i in range(3) for name in "ab"]
        a, b = timings["a"], timings["b"]
        assert (a.median, a.min, a.max, a.calls) == pytest.approx((3.0, 1.0, 8.0, 1))
        assert (b.median, b.min, b.max) == pytest.approx((0.02, 0.01, 0.03))

    def test_compiling_timed_apart_is_believed(self):
        assert Started(Contestant(lambda n: None, 5.0), 1.0, 0.5).compile_seconds == 5.0
        assert Started(Contestant(lambda n: None), 0.5, 0.6).compile_seconds == 0.0

    def test_ceiling_is_the_fastest(self):
        makers = [lambda n: Contestant(lambda calls: time.sleep(0.05)), lambda n: jax_product(n, p)]
        p = "float32"
        slow = product_ceiling(makers[:1], [8], 1)
        assert 0 < slow <= 2 * 8**3 / 0.05
        assert product_ceiling(makers, [8, 64], 1) > slow

    def test_time_limit(self):
        with time_limit(60):
            pass
        before = signal.getsignal(signal.SIGALRM)
        with pytest.raises(TooSlow), time_limit(0.01):
            time.sleep(60)
        assert signal.getsignal(signal.SIGALRM) is before

    def test_memory_of_this_process(self):
        assert 2**24 < peak_resident_bytes() < 2**40

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_a_started_process_does_not_report_its_parents_peak(self):
        """If a process was larger than what it executes, ru_maxrss keeps its larger peak."""
        code = "from jaxgru.parallel.hardware import peak_resident_bytes as p; print(p())"
        filled = b"1" * 2**30
        assert len(filled) < peak_resident_bytes()
        run = [sys.executable, "-c", code]
        child = subprocess.run(run, capture_output=True, text=True, check=True)
        assert 2**24 < int(child.stdout) < len(filled)


def record(contestant: str, median: float | str, run: str = NOW, kind: str = "training", **more):
    """A record of TINY, of 1000 s compiling and 3 MiB; more: fields to replace."""
    what, _, batch = kind.partition("_")
    task = Task(TINY, what, int(batch or 4), 6)
    result = median
    if not isinstance(median, str):
        timing = Timing((median * 0.5, median, median * 2), 1)
        result = Started(Contestant(lambda n: None, 1000.0), 0, 0), timing
    return changed(make_record(run, task, "float32", contestant, result, 3 * 2**20), **more)


def about(hardware: str = "a machine") -> BenchmarkRun:
    return BenchmarkRun(
        hardware=hardware, command="python scripts/benchmark.py", rounds=3,
        versions={"jax": "0.1"}, ceilings={"float32": 1e6}, note="torch uses 2 threads.",
    )  # fmt: skip


class TestRecords:
    def test_new_ones_replace_the_same_and_no_others(self, tmp_path):
        nothing = benchmark_page.load(tmp_path / "none.json")
        old = [record("jaxgru", 1.0, EARLIER), record("haiku", 2.0, EARLIER)]
        old += [record("jaxgru", 3.0, EARLIER, config="other"),
                record("jaxgru", 4.0, EARLIER, kind="forward"),
                record("jaxgru", 5.0, EARLIER, batch_size=8),
                record("jaxgru", 6.0, EARLIER, precision="tf32")]  # fmt: skip
        data = merge(nothing, EARLIER, about(), old)
        assert data.records == old
        new = merge(data, NOW, about(), [record("jaxgru", 7.0)])
        assert [r.median for r in new.records] == [7.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert list(new.runs) == [EARLIER, NOW]
        elsewhere = merge(data, NOW, about("another machine"), [record("jaxgru", 7.0)])
        assert [r.median for r in elsewhere.records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

        benchmark_page.save(tmp_path / "some.json", new)
        assert benchmark_page.load(tmp_path / "some.json") == new

    def test_runs_that_are_replaced_altogether_go(self):
        data = merge(Benchmarks(), EARLIER, about(), [record("nnx", 1.0, EARLIER)])
        assert list(merge(data, NOW, about(), [record("nnx", 2.0)]).runs) == [NOW]

    @pytest.mark.parametrize("text", ["{", "[]", '{"records": [{"run": "x"}], "runs": {}}'])
    def test_another_file_is_one_sentence(self, tmp_path, text):
        (path := tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match="is not a file of measurements"):
            benchmark_page.load(path)


class TestPage:
    def test_rows(self):
        records = [
            record("haiku", 0.005, EARLIER),
            record("jaxgru", 0.002, memory_bytes=None),
            record("torch.compile", "RuntimeError: no compiler"),
        ]
        runs = {NOW: about(), EARLIER: about()}
        share = 100 * records[0].operations / 1e6
        assert benchmark_page.rows(records, runs) == [
            ["jaxgru", "2.00", "1.00 … 4.00", "1.00", f"{share / 0.002:.1f}%", "1000.0 s", "–"],
            ["haiku †", "5.00", "2.50 … 10.0", "2.50", f"{share / 0.005:.1f}%", "1000.0 s",
             "3 MiB"],
            ["torch.compile", "failed", "–", "–", "–", "–", "–"],
        ]  # fmt: skip
        assert benchmark_page.failures(records) == [
            "tiny: torch.compile failed: RuntimeError: no compiler."
        ]

    def test_units_of_sampling(self):
        """6 tokens a row in 2 ms: 333 µs per token; of 64 rows 192,000 tokens/s."""
        runs = {NOW: about()}
        (one,) = benchmark_page.rows([record("jaxgru", 0.002, kind="sampling_1")], runs)
        (many,) = benchmark_page.rows([record("jaxgru", 0.002, kind="sampling_64")], runs)
        assert one[1:3] == ["333", "167 … 667"]
        assert many[1:3] == ["192,000", "96,000 … 384,000"]
        assert [benchmark_page.unit(f"sampling_{n}") for n in (1, 64)] == [
            "µs per token",
            "tokens/s",
        ]

    def test_all_of_it(self, tmp_path, drawn):
        records = [record("jaxgru", 0.002), record("nnx", 0.003), record("haiku", "no luck")]
        records.append(record("jaxgru", 0.001, kind="forward"))
        data = merge(Benchmarks(), NOW, about(), records)
        elsewhere = changed(about("a GPU"), ceilings={"float32": 5e13, "copy": 4e12})
        data = merge(data, EARLIER, elsewhere, [record("jaxgru", 0.1, EARLIER)])
        benchmark_page.write(tmp_path, data)
        page = (tmp_path / "performance.md").read_text()
        assert page.count("<summary>Training step, 4 × 6, float32</summary>") == 2
        assert "on a machine\n" in page and "on a GPU\n" in page and "2026-02-03 04:05" in page
        assert (
            "| tiny | jaxgru | 2.00 |" in page and "|  | nnx | 3.00 | 1.50 … 6.00 | 1.50 |" in page
        )
        assert "- tiny: haiku failed: no luck." in page
        assert "at jaxgru's speed: tiny 4 s (2,000 steps)." in page  # 10 epochs of 200 steps
        assert "float32 product 50,000 GFLOP/s; copy 4.00 TB/s" in page
        # on the machine measured last
        assert "| training step, tiny | 2.00 ms | – | 1.50× | – | – |" in page
        assert "| forward pass, tiny | 1.00 ms | – | – | – | – |" in page
        assert "![A training step is 1.5× as fast" in page
        assert (tmp_path / "figures" / "speed.svg").stat().st_size > 5000

    def test_ppo(self, tmp_path):
        """Ratios to Flax's cell on the machine measured last, by size, seeds and rows."""
        both = {"jaxgru": 2.0, "linen": 3.0}
        records = [record(n, t, kind="ppo", batch_size=1) for n, t in both.items()]
        records += [record(n, t / t, kind="ppo", batch_size=4) for n, t in both.items()]
        records += [changed(record(n, 1 / t), kind="ppo_8") for n, t in both.items()]
        records.append(record("jaxgru", 1.0, kind="ppo", batch_size=16))
        data = merge(Benchmarks(), NOW, about(), records)
        old = [record(n, t * t, EARLIER, kind="ppo", batch_size=1) for n, t in both.items()]
        data = merge(data, EARLIER, about("another machine"), old)
        benchmark_page.write(tmp_path, data)
        page = (tmp_path / "performance.md").read_text()
        assert "| rows of a minibatch | 1 | 4 |\n" in page
        assert "| tiny | 1.50× | 1.00× |\n| tiny, 8 seeds at once | – | 0.67× |\n" in page
        assert "<summary>8 PPO trainings at once, minibatches of 4 × 6, float32</summary>" in page
        assert benchmark_page.expected_sentences(data)[:2] == [
            "A whole PPO training is 1.0 to 1.5× as fast as with Flax's cell.",
            "With 8 seeds in one program, it is 0.67× as fast.",
        ]

    def test_no_training_is_no_figure(self, tmp_path):
        data = merge(Benchmarks(), NOW, about(), [record("nnx", 1, kind="forward")])
        benchmark_page.write(tmp_path, data)
        assert not list((tmp_path / "figures").iterdir())
        assert "figures/" not in (tmp_path / "performance.md").read_text()

    def test_the_figure_has_one_baseline(self):
        """Of its contestants alone, and of configs that jaxgru was measured with."""
        times = {"jaxgru": 2, "torch.nn": 5, "haiku": 3, "nnx-one-device": 8, "another": 1}
        records = [record(name, seconds) for name, seconds in times.items()]
        expected = {"jaxgru": (2000, 1), "dm-haiku*": (3000, 1.5), "torch.nn*": (5000, 2.5)}
        assert benchmark_page.ratios(records) == {"tiny": expected}
        assert list(benchmark_page.ratios(records)["tiny"]) == list(expected)
        assert benchmark_page.ratios(records[1:]) == {}


LAYERS = [name for name, entry in CONTESTANTS.items() if entry.layer and "one-dev" not in name]


class TestContestants:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in ("jaxgru", "torch") else pytest.mark.slow)
            for name, entry in CONTESTANTS.items()
            if entry.model and name not in ("wavefront", "torch.compile")
        ],
    )
    def test_trains(self, name):
        """From about log V; the tokens being random, there is nothing more to be learnt."""
        assert peers.why_absent(name) in (None, "there is only one device")
        torch.manual_seed(0)  # of batches and dropout
        contestant = peers.build(name, Task(TINY, "training", 4, 6), "float32")
        first = float(contestant.run(1))
        last = float(contestant.run(40))
        assert np.log(11) / 2 < first < 2 * np.log(11)
        assert last < first + 0.1

    @pytest.mark.parametrize("name", ["torchref", "torch.nn", "haiku", "nnx"])
    @pytest.mark.parametrize("cell", ["lstm", "rnn"])
    def test_other_cells(self, name, cell):
        model = ModelConfig(cell, 11, 5, 9, 2, final_norm=cell == "lstm")
        config = Config("other", model, training=TINY.training)
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

    @pytest.mark.parametrize("name", [LAYERS[0], *slow(*LAYERS[1:])])
    def test_layers_with_resets(self, name):
        """After a reset, outputs are those of a sequence that begins there."""
        task = LayerTask("gru" if name == "haiku" else "gru, reset after", 2, 5, 3, 4, resets=True)
        layer = CONTESTANTS[name].layer(task)
        x = jax.random.normal(jax.random.key(0), (5, 2, 3))
        reset = jnp.zeros((5, 2), bool).at[2].set(True)
        y = layer.apply(layer.params, x, reset)
        expected = layer.apply(layer.params, x[2:], reset[3:].repeat(2, 0)[:3])
        np.testing.assert_allclose(y[2:], expected, rtol=1e-5, atol=1e-6)
        changed = layer.apply(layer.params, x, jnp.zeros((5, 2), bool))
        assert np.abs(changed[2:] - expected).max() > 1e-3

    @pytest.mark.parametrize("name", ["torch.nn", *(f"{n}-one-device" for n in LAYERS)])
    @pytest.mark.parametrize("resets", [False, True])
    def test_layers(self, name, resets):
        """The gradient of x has its shape; who lacks a cell or resets says so."""
        name = name.replace("autodiff-one-device", "autodiff")
        if name == "torch.nn" and resets:
            with pytest.raises(UserError, match="torch.nn has no such layer"):
                peers.build(name, LayerTask("lstm", 2, 5, 3, 4, resets), "float32")
            return
        contestant = peers.build(name, LayerTask("lstm", 2, 5, 3, 4, resets), "float32")
        result = contestant.run(1)
        if name != "torch.nn":
            loss, _, of_x = result
            assert np.isfinite(loss) and of_x.shape == (5, 2, 3) and np.abs(of_x).min() > 0
        other = "gru, reset after" if name.startswith("haiku") else "gru"
        if not name.startswith(("jaxgru", "autodiff")):
            task = LayerTask(other, 2, 5, 3, 4)
            assert not peers.is_measured(name, task)
            with pytest.raises(UserError, match="has no such layer"):
                peers.build(name, task, "float32")

    @pytest.mark.parametrize("seeds", [1, *slow(2)])
    def test_ppo_learns_the_same(self, seeds):
        """With Flax's cell as with ours, and each seed as it does alone."""
        task = PPOTask(4, 1, seeds, num_tokens=80, updates=3)
        ours, theirs = (peers.build(n, task, "float32").run(1) for n in ("jaxgru", "linen"))
        assert ours.shape == ((3,) if seeds == 1 else (2, 3)) and np.ptp(ours) > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert not peers.is_measured("haiku", task)

    def test_operations_of_ppo(self):
        """5 acts for each of 4 · 2 environments, each learned from 4 times at 3 times the cost."""
        products = 3 * (4 * 4 + 4 * 4) * 2 * 3
        assert PPOTask(4, 2, 3, num_tokens=5, updates=7).operations == 7 * 40 * (1 + 12) * products

    def test_operations_of_a_layer(self):
        """Both products of 3 or 4 gates, a multiplication and an addition each, three times."""
        assert LayerTask("gru", 2, 5, 3, 4).operations == 3 * 2 * 5 * 2 * (3 * 12 + 4 * 12)
        assert LayerTask("lstm", 2, 5, 3, 4).operations == 3 * 2 * 5 * 2 * (3 * 16 + 4 * 16)

    def test_samplers_give_tokens(self):
        task = Task(TINY, "sampling", 3, 4)
        shapes = {"torchref": (3, 4), "torch.nn": (3, 4), "haiku": (4, 3, 1), "nnx": (4, 3, 1)}
        for name, shape in shapes.items():
            result = peers.build(name, task, "float32").run(1)
            tokens = np.asarray(result[0] if "torch" in name else result)
            assert tokens.shape == shape and ((0 <= tokens) & (tokens < 11)).all()

    def test_absent_ones_are_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "haiku", None)
        assert peers.why_absent("haiku").startswith("haiku cannot be imported")
        assert peers.why_absent("jaxgru") is None
        assert peers.why_absent("wavefront") == "it is for GPUs"
        with pytest.raises(UserError, match="its layers cannot run at once over 6 steps"):
            peers.build("wavefront", Task(TINY, "forward", 4, 6), "float32")

    def test_a_model_that_torchref_lacks(self):
        config = replace(TINY, model=replace(TINY.model, second_bias=False, reset_gate="after"))
        with pytest.raises(UserError, match="torchref has no such model"):
            peers.build("torchref", Task(config, "forward", 4, 6), "float32")

    @pytest.mark.parametrize("name", ["autodiff", "haiku", "nnx"])
    def test_who_computes_in_float32_only(self, name):
        with pytest.raises(UserError, match="on a CPU it computes in float32 only"):
            peers.build(name, Task(TINY, "forward", 4, 6), "bfloat16")


class TestScript:
    @pytest.mark.parametrize(
        "options, says",
        [
            (["--configs", "astra_delta"], "there is no config 'astra_delta'"),
            (["--configs", "bengio_mlp"], "bengio_mlp: only recurrences are measured"),
            (["--only", "keras"], "--only knows no 'keras'; it knows jaxgru, jaxgru-one"),
            (["--what", "resting"], "--what knows no 'resting'"),
            (["--precision", "float8"], "--precision knows no 'float8'"),
            (["--precision", "tf32"], "--precision tf32 needs a GPU; a CPU has float32 and"),
            (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
            (["--compile-limit", "0"], "--compile-limit is 0"),
            (["--batch-size", "0"], "training.batch_size is 0"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, script, monkeypatch, options, says):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which is restored after it
        done = script("benchmark", *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"benchmark.py: {says}") and done.err.count("\n") == 1

    @pytest.fixture
    def fake(self, monkeypatch, tmp_path):
        """Runs main with contestants that take no time, in tmp_path."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.setattr(jax.config, "update", lambda name, value: None)
        monkeypatch.setattr(benchmark.signal, "signal", lambda number, handler: None)
        monkeypatch.setattr(benchmark.gc, "collect", lambda: None)
        monkeypatch.setattr(benchmark.Benchmark, "ceilings", lambda self: {"float32": 1e9})
        contestant = Contestant(lambda calls: None)
        monkeypatch.setattr(benchmark, "build", lambda name, task, precision: contestant)

        def main(*options: str) -> None:
            monkeypatch.setattr(sys, "argv", ["benchmark.py", "--quick", *options])
            benchmark.main()

        return main

    def test_interrupted_it_writes_what_it_has(self, monkeypatch, fake, tmp_path):
        def build(name, task, precision):
            if task.what == "forward":
                raise KeyboardInterrupt
            return Contestant(lambda calls: None)

        monkeypatch.setattr(benchmark, "build", build)
        with pytest.raises(KeyboardInterrupt):
            fake("--configs", "astra_alpha", "--docs", "here", "--only", "jaxgru", "nnx")
        records = json.loads((tmp_path / "here" / "benchmarks.json").read_text())["records"]
        assert [(r["kind"], r["contestant"]) for r in records] == [
            ("training", "jaxgru"), ("training", "nnx"),
        ]  # fmt: skip
        assert "| astra_alpha | jaxgru |" in (tmp_path / "here" / "performance.md").read_text()

    def test_ceilings_are_measured_or_known_or_absent(self, monkeypatch, fake, tmp_path, capsys):
        """And a page says which."""
        options = ["--configs", "astra_alpha", "--what", "forward", "--only", "jaxgru"]
        device = jax.devices()[0].device_kind
        of_device = f"those known of an {device}"
        for known, says in ({}, "unknown"), ({device: {"float32": 2e9}}, of_device):
            monkeypatch.setattr(benchmark.timing, "KNOWN_CEILINGS", known)
            fake(*options, "--docs", says, "--no-ceilings")
            page = (tmp_path / says / "performance.md").read_text()
            assert f"ceilings were not measured, but are {says}" in page
            assert ("Ceiling: float32 product 2 GFLOP/s. torch" in page) == bool(known)
        fake(*options, "--docs", "measured")
        page = (tmp_path / "measured" / "performance.md").read_text()
        assert "Ceiling: float32 product 1 GFLOP/s." in page and "not measured, but" not in page

    def test_configs_take_turns(self, fake, tmp_path):
        """Whatever the time is enough for, each config has some of it, in the order asked for."""
        options = ["--what", "forward", "--only", "jaxgru", "--precision", "bfloat16", "float32"]
        fake("--configs", "astra_beta", "astra_alpha", *options, "--docs", "here")
        records = json.loads((tmp_path / "here" / "benchmarks.json").read_text())["records"]
        assert [(r["precision"], r["config"]) for r in records] == [
            ("bfloat16", "astra_beta"), ("bfloat16", "astra_alpha"),
            ("float32", "astra_beta"), ("float32", "astra_alpha"),
        ]  # fmt: skip

    def test_failures_are_kept(self, monkeypatch, fake, tmp_path, capsys):
        def build(name, task, precision):
            if name == "nnx":
                raise RuntimeError("of no use\nat all")
            return Contestant(lambda calls: None)

        monkeypatch.setattr(benchmark, "build", build)
        only = ["--only", "jaxgru", "nnx", "--what", "training", "--configs", "astra_alpha"]
        fake(*only, "--docs", "here")
        assert "nnx failed: RuntimeError: of no use." in capsys.readouterr().out
        assert (tmp_path / "here" / "performance.md").exists()

    def test_quick_writes_nothing_unless_told_where(self, fake, tmp_path):
        fake("--configs", "astra_alpha", "--what", "forward", "--only", "jaxgru")
        fake("--configs", "astra_alpha", "--what", "sampling", "--only", "autodiff")  # nobody
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_everything_in_a_process(self, tmp_path, monkeypatch):
        """Every contestant but torch.compile and a GPU's own, with a whole model; and all files."""
        (tmp_path / "tiny.toml").write_text(TINY_TOML)
        options = ["--configs", tmp_path / "tiny.toml", "--quick", "--no-torch-compile"]
        options += ["--what", "training", "forward", "sampling"]
        done = python_script("benchmark", *options, "--docs", tmp_path / "docs")
        assert (done.returncode, done.stderr) == (0, "")
        data = json.loads((tmp_path / "docs" / "benchmarks.json").read_text())
        (run,) = data["runs"].values()
        assert run["ceilings"]["float32"] > 0 and run["versions"]["jax"] == jax.__version__
        names = set(CONTESTANTS) - {"torch.compile", "wavefront", "linen", "equinox"}  # two: layers
        names -= {name for name in names if "-one-device" in name}  # 4 rows are not split
        found: dict[str, set[str]] = {}
        for r in data["records"]:
            assert r["config"] == "tiny" and "failed" not in r
            assert 0 < r["min"] <= r["median"] <= r["max"] and r["compile_seconds"] >= 0
            found.setdefault(r["kind"], set()).add(r["contestant"])
        assert found == dict.fromkeys(["training", "forward"], names) | dict.fromkeys(
            ["sampling_1", "sampling_64", "sampling_512"], names - {"autodiff"}
        )
        page = (tmp_path / "docs" / "performance.md").read_text()
        assert page.count(", float32</summary>") == 5 and "failed:" not in page
        assert (tmp_path / "docs" / "figures" / "speed.svg").exists()

    @pytest.mark.slow
    def test_memory_is_a_process_of_its_own(self, tmp_path):
        (tmp_path / "tiny.toml").write_text(TINY_TOML)
        options = ["--configs", tmp_path / "tiny.toml", "--only", "jaxgru", "--probe", "forward"]
        done = python_script("benchmark", *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert 2**26 < int(done.stdout) < 2**34
