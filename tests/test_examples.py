"""The examples, in a smaller form: that they learn, and that they compute what they say."""

import dataclasses
import importlib.util
import json
import operator
import os
import re
import runpy
import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NODE_MODULES, ROOT, needs_web
from random_models import lines_model

import jaxgru
from jaxgru import lm
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.generation import Options

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
OPEN_PAGE = """
import { launch } from "./browser.mjs";
const [folder, modules] = process.argv.slice(1);
const browser = await launch();
const page = await browser.newPage();
await page.route("**", (route) => {  // the page's folder, and the packages that it loads
  const { host, pathname } = new URL(route.request().url());
  const package_ = modules + pathname.replace("/npm", "").replace(/@[0-9.]+/, "");
  return route.fulfill({ path: host === "page" ? folder + pathname : package_ });
});
await page.goto("http://page/index.html");
await page.waitForFunction(() => document.querySelector("#text").textContent.length === 39);
console.log(JSON.stringify(await page.textContent("#text")));
await browser.close();
"""


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ppo, r2d2 = map(example, ("recurrent_ppo", "r2d2"))
attention, forecasting, tuning = map(example, ("attention", "forecasting", "fine_tuning"))
evolution, rssm = map(example, ("evolution", "rssm"))
labelling, classification = map(example, ("sequence_labelling", "sequence_classification"))


def run(monkeypatch, capsys, name, *arguments):
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if "torch" in path.stem else ())
        for path in EXAMPLES
    ],
)
def test_help_begins_with_what_the_example_does(path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, capsys, path.stem, "--help")
    shown = capsys.readouterr().out
    assert example(path.stem).__doc__.splitlines()[0] in shown
    options = shown.partition("\noptions:\n")[2]
    assert not re.search(r"^  --\S+ \S+\s+(\(|default)", options, re.M)  # without a meaning


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("recurrent_ppo", ["--num-envs", 6], "must be a multiple of 4, the minibatches."),
        ("recurrent_ppo", ["--delay", 128], "must be above --delay, or no episode ends"),
        ("rssm", ["--updates", 0], "--updates must be above 0."),
        ("rssm", ["--figure", "ball.jpeg"], "--figure is ball.jpeg; it must end in .svg or"),
        ("rssm", ["--figure", "no/ball.svg"], "and no file can be created there"),
        ("rssm", ["--seed", 2**32], "--seed must be from 0 to 2³² − 1."),
        ("r2d2", ["--burn-in", 0], "--burn-in must be above 0."),
        ("r2d2", ["--learned", 996], "--learned and --burn-in must be below 996 together"),
        ("fine_tuning", ["--text", "missing.txt"], "missing.txt"),
        ("onnx_stream", ["--model", "scribe_alpha"], "is not a character model"),
    ],
)
def test_what_an_example_cannot_do(name, options, says, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, name, *options)
    assert says in capsys.readouterr().err


SMALL_PPO = ppo.Settings(
    delay=3, updates=40, num_envs=16, num_steps=26, hidden_dim=16, learning_rate=5e-3
)


class TestRecurrentPPO:
    def test_only_a_policy_with_memory_succeeds(self):
        """The return of any other is 0 in expectation: the mean of n episodes is within 5/√n.

        With memory, where training goes depends on rounding; six seeds had 0.89 to 0.998.
        """
        n = 10 * SMALL_PPO.num_envs * (SMALL_PPO.num_steps // (SMALL_PPO.delay + 1))
        last = {}
        for name in ("none", "jaxgru"):
            rnn = ppo.RNNS[name]
            params = ppo.init_policy(jax.random.key(0), rnn, SMALL_PPO.hidden_dim)
            train = jax.jit(partial(ppo.train, rnn=rnn, s=SMALL_PPO))
            last[name] = float(train(params, jax.random.key(1))[1][-10:].mean())
        assert abs(last["none"]) < 5 / n**0.5 and last["jaxgru"] > 0.6

    @pytest.mark.parametrize("name", [*ppo.RNNS, "lstm"])
    def test_training_sees_the_policy_as_it_acted(self, name):
        """The unroll with resets gives the steps' log p and values, across episodes and rollouts.

        So PPO's ratio starts from 1. The second rollout begins within episodes of 4 steps.
        """
        rnn = ppo.RNNS.get(name) or ppo.RNNS["jaxgru"]._replace(init=ppo.LAYERS[name])
        params = ppo.init_policy(jax.random.key(0), rnn, SMALL_PPO.hidden_dim)
        actors = ppo.new_actors(jax.random.key(1), params, SMALL_PPO)

        @jax.jit
        def both(key, actors):
            after, seen, _ = ppo.rollout(params, rnn, key, actors, SMALL_PPO)
            return after, seen, ppo.policy(params, rnn.unroll, seen.x, actors.carry, seen.starts)

        for key in jax.random.split(jax.random.key(2)):
            actors, seen, (log_p, value, end) = both(key, actors)
            taken = jnp.take_along_axis(log_p, seen.action[..., None], -1)[..., 0]
            np.testing.assert_allclose(taken, seen.log_p, atol=1e-5)
            np.testing.assert_allclose(value, seen.value, atol=1e-5)
            np.testing.assert_allclose(end, actors.carry, atol=1e-5)
        assert not seen.starts[0].any() and seen.starts.any()

    def test_advantages_are_sums_of_later_rewards(self):
        """With λ = 1: discounted rewards up to the end of the episode or V, minus V now."""
        rng = np.random.default_rng(0)
        T = 9
        s = ppo.Settings(lambda_=1.0)
        reward = rng.normal(size=T)
        value = rng.normal(size=T)
        done = rng.random(T) < 0.3
        seen = ppo.Rollout(*[None] * 4, *(jnp.asarray(a)[:, None] for a in (value, reward, done)))
        found = ppo.advantages(seen, jnp.array([0.7]), s)[:, 0]
        for t in range(T):
            ends = [i for i in range(t, T) if done[i]]
            stop = ends[0] + 1 if ends else T
            expected = sum(s.gamma ** (i - t) * reward[i] for i in range(t, stop)) - value[t]
            expected += 0 if ends else s.gamma ** (T - t) * 0.7
            assert found[t] == pytest.approx(expected, abs=1e-5)

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys):
        out = run(
            monkeypatch, capsys, "recurrent_ppo", "--updates", 10, "--num-envs", 4,
            "--num-steps", 8, "--delay", 2, "--hidden-dim", 4, "--seeds", 2,
        )  # fmt: skip
        *lines, last = out.splitlines()
        counts = {line.split()[0]: line.split()[2] for line in lines[:3]}
        assert counts["jaxgru"] == counts["flax"] and counts.keys() == ppo.RNNS.keys()
        seeds = [line.split(":")[0].split() for line in lines[3:]]
        assert seeds == [[name, "seed", str(seed)] for seed in (0, 1) for name in ppo.RNNS]
        assert re.fullmatch(
            r"The whole training is [\d.]+ times as fast with jaxgru as with flax "
            r"\(the median of 2; [\d.]+ to [\d.]+\)\.", last
        )  # fmt: skip


class TestR2D2:
    SMALL = r2d2.Settings(
        updates=3, learned=4, burn_in=3, num_envs=3, hidden_dim=5, capacity=12, batch_size=7,
        epsilon=0.3, end=0.2, target_every=2,
    )  # fmt: skip

    @pytest.fixture(scope="class")
    @classmethod
    def piece(cls):
        """Parameters, others, and what the agent of the first saw: whole episodes and parts."""
        s = cls.SMALL
        keys = jax.random.split(jax.random.key(0), 4)
        params = r2d2.init(keys[0], s)
        other = r2d2.init(keys[1], s)
        actors = r2d2.new_actors(keys[2], s.batch_size, s)
        rollout = jax.jit(partial(r2d2.rollout, num_steps=8, s=s))
        for key in jax.random.split(keys[3]):  # the second begins within episodes
            actors, seen = rollout(params, key, actors)
        assert seen.starts.any() and not seen.starts.all(0).any() and seen.carry[0].any()
        return params, other, seen

    def test_learning_sees_the_agent_as_it_acted(self, piece):
        params, _, seen = piece
        q = [r2d2.q_step(params, seen.x[t], seen.carry[t], seen.starts[t])[0] for t in range(8)]
        learned = r2d2.q_learned(params, seen, self.SMALL)
        np.testing.assert_allclose(learned, jnp.stack(q)[3:], atol=1e-5)
        zeros = r2d2.q_learned(params, seen, self.SMALL._replace(stored=False))
        whole = np.cumsum(np.array(seen.starts), 0)[3:] > 0  # an episode started since
        np.testing.assert_allclose(zeros[whole], learned[whole], atol=1e-5)
        assert abs(zeros - learned)[~whole].min(-1).all()

    def test_the_loss(self, piece):
        """Double Q-learning, one step at a time; and none of it teaches the burn-in."""
        params, other, seen = piece
        q, later = (np.array(r2d2.q_learned(p, seen, self.SMALL)) for p in (params, other))
        errors = []
        for t in range(3, 7):
            for row in range(self.SMALL.batch_size):
                wanted = float(seen.reward[t, row])
                if not seen.done[t, row]:
                    wanted += self.SMALL.gamma * later[t - 2, row, q[t - 2, row].argmax()]
                errors.append((q[t - 3, row, seen.action[t, row]] - wanted) ** 2)

        def of_x(x):
            return r2d2.loss_fn(params, other, seen._replace(x=x), self.SMALL)

        loss, gradient = jax.jit(jax.value_and_grad(of_x))(seen.x)
        assert loss == pytest.approx(np.mean(errors), rel=1e-5)
        assert [bool(of_step.any()) for of_step in gradient[:7]] == [False] * 3 + [True] * 4

    @pytest.mark.parametrize("oldest", [0, 5, 12])
    def test_a_piece_is_consecutive_steps_of_one_environment(self, oldest):
        """Each step of the buffer is named after its time and environment."""
        s = self.SMALL._replace(batch_size=200)
        times = (np.arange(12) - oldest) % 12
        names = jnp.asarray(times[:, None] * 10 + np.arange(3))
        piece = np.array(r2d2.sample(names, jnp.int32(oldest), jax.random.key(0), s))
        assert (np.diff(piece, axis=0) == 10).all()
        assert {*piece[0].tolist()} == {10 * t + env for t in range(5) for env in range(3)}

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys):
        out = run(monkeypatch, capsys, "r2d2", "--updates", 3, "--hidden-dim", 4, "--seeds", 2)
        names = ["zeros", "zeros, burn-in 4", "stored state", "stored state, burn-in 4"]
        assert [line[:24].strip() for line in out.splitlines()[2:]] == names
        assert all(line.count("%") == 6 for line in out.splitlines()[2:])


class TestFineTuning:
    @pytest.mark.slow
    def test_the_trained_recurrence_is_ahead_on_another_text(self, monkeypatch, capsys, tmp_path):
        """The text has characters that astra_alpha does not know; 5 steps on 5,000 characters."""
        text = tmp_path / "text.txt"
        saved = tmp_path / "mine.safetensors"
        topics = "\n".join(importlib.import_module("pydoc_data.topics").topics.values())
        text.write_text(topics[:5_000], encoding="utf-8")
        out = run(
            monkeypatch, capsys, "fine_tuning", "--text", text, "--save", saved,
            "--epochs", 1, "--steps-per-epoch", 5,
        )  # fmt: skip
        lines = [line.split(": ")[1].split(", ") for line in out.splitlines() if "  epoch " in line]
        losses = np.array(lines, float)
        assert losses.shape == (1, 2) and losses[0, 1] < losses[0, 0] - 0.2
        assert topics[:20] in out.partition("  epoch 1")[2]
        _, _, tokenizer = lm.load(saved)
        assert tokenizer.vocabulary == "".join(sorted(set(topics[:5_000])))

    def test_what_a_model_knew_it_still_computes(self):
        """On a text of known characters, the other vocabulary changes no logit of theirs."""
        params, config, _ = lm.load("elman_alpha")
        old = lm.load("elman_alpha")[2].pieces
        new = ["é", *"EMOR", "ß"]
        sizes = dataclasses.replace(config.model, vocab_size=len(new))
        fresh = lm.init(jax.random.key(0), sizes)
        adapted = tuning.adapt(params, old, new, fresh)
        logits = [
            lm.apply(p, np.array([[pieces.index(c) for c in "ROMEO"]]))[0]
            for p, pieces in ((params, old), (adapted, new))
        ]
        theirs = logits[0][..., [old.index(c) for c in "EMOR"]]
        np.testing.assert_allclose(logits[1][..., 1:5], theirs, atol=1e-5)
        np.testing.assert_array_equal(adapted.embedding[jnp.array([0, 5])], fresh.embedding[::5])


class TestEvolution:
    def test_memory_is_what_evolves(self):
        """Blind to the target, the same policy walks alike for both: −1 at best.

        How far a policy comes in 60 generations depends on rounding: with five seeds, to −0.49
        and better.
        """
        s = evolution.Settings(hidden_dim=4, pairs=32, generations=60, episodes=4, steps=20)
        policy, rewards = evolution.evolve(s)
        assert rewards.shape == (60,) and rewards[0] < -0.9
        targets = jnp.array([-1.0, 1.0])
        assert evolution.returns(policy, targets, s.steps).mean() > -0.8
        W = policy["gru"].W.at[0].set(0)  # of the target
        blind = policy | {"gru": policy["gru"].replace(W=W)}
        assert evolution.returns(blind, targets, s.steps).mean() < -1 + 1e-5  # rounding

    def test_ranks(self):
        """Of four values: −½, −1/6, 1/6 and ½."""
        ranks = evolution.ranked(jnp.array([[3.0, -1.0], [1e9, 2.0]]))
        np.testing.assert_allclose(ranks, [[1 / 6, -1 / 2], [1 / 2, -1 / 6]], rtol=1e-6)


class TestForecasting:
    def test_a_kept_state_is_worth_more_than_a_reset_one(self, monkeypatch, capsys):
        """And more than the two forecasts without a model; all months are forecast, in order."""
        out = run(monkeypatch, capsys, "forecasting", "--steps", 100, "--hidden-dim", 8)
        last, year, _, reset, kept = (float(e) for e in re.findall(r"([\d.]+) °C", out)[1:])
        celsius = forecasting.temperatures()
        assert celsius.shape == (61 * 12,) and celsius[[0, -1]].tolist() == pytest.approx(
            [23.11, 22.07]  # January 1950 and December 2010, as NOAA prints them
        )
        assert kept < 0.7 and min(last, year, reset) > 0.9

    def test_a_month_at_a_time_is_the_whole_series(self):
        key = jax.random.key(0)
        params = forecasting.init(key, 5) | {"head": jax.random.normal(key, 5)}
        series = jax.random.normal(key, (2, 7))
        whole, carry = forecasting.forecasts(params, series)
        _, kept = forecasting.forecasts(params, series[:, :3])
        for t in range(3, 7):
            one, kept = forecasting.forecast(params, series[:, t], kept)
            np.testing.assert_allclose(one, whole[:, t], atol=1e-6)
        np.testing.assert_allclose(kept, carry, atol=1e-6)


class TestAttention:
    SMALL = attention.Settings(hidden_dim=6)

    @pytest.mark.parametrize("cell", ["gru", pytest.param("lstm", marks=pytest.mark.slow)])
    def test_step_by_step_is_teacher_forcing(self, cell):
        """With the characters that it wrote; and padding of the source has no influence."""
        params = attention.init(jax.random.key(0), self.SMALL._replace(cell=cell))
        source, lengths, _ = attention.dates(np.random.default_rng(0), 4)
        written, logits = attention.translate(params, source, lengths)
        forced = jax.jit(attention.forced)
        np.testing.assert_allclose(forced(params, source, lengths, written), logits, atol=1e-5)
        is_real = jnp.arange(source.shape[1]) < lengths[:, None]
        other = forced(params, jnp.where(is_real, source, 5), lengths, written)
        np.testing.assert_allclose(other, logits, atol=1e-5)

    def test_attention(self):
        """One place at a time, from the paper's equations 7 and 8 and their "general" score."""
        rng = np.random.default_rng(0)
        params = {"attention": rng.normal(size=(4, 4)), "head": rng.normal(size=(8, 3))}
        y = rng.normal(size=(2, 5, 4))
        memory = rng.normal(size=(2, 3, 4))
        found = attention.scores(params, jnp.array(y), jnp.array(memory), jnp.array([3, 2]))
        for b, n in enumerate((3, 2)):
            for t in range(5):
                a = np.exp([y[b, t] @ params["attention"] @ memory[b, s] for s in range(n)])
                context = sum(a[s] / a.sum() * memory[b, s] for s in range(n))
                wanted = np.concatenate([y[b, t], context]) @ params["head"]
                np.testing.assert_allclose(found[b, t], wanted, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys):
        out = run(monkeypatch, capsys, "attention", "--steps", 400)
        before, after = map(float, re.findall(r"([\d.]+)%", out))
        assert before < 1 and after > 90
        assert float(re.search(r"differ by at most (\S+)$", out, re.M)[1]) < 1e-3


@pytest.mark.slow
def test_from_pytorch_and_back(monkeypatch, capsys, tmp_path):
    """Equal before training in JAX and after it, which lowers the loss."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    options = "--steps", 50, "--hidden-dim", 8, "--text", tmp_path / "text.txt"
    out = run(monkeypatch, capsys, "from_pytorch", *options)
    assert re.findall(r"^(\w+) +step  50  loss \d", out, re.M) == ["PyTorch", "jaxgru"]
    (before, gap), (after, gap_after) = re.findall(r"loss ([\d.]+); .* at most (\S+)$", out, re.M)
    assert float(after) < float(before) - 0.1
    assert max(float(gap), float(gap_after)) < 1e-5


class TestOnnxStream:
    def test_it_is_the_models_text(self, monkeypatch, capsys):
        """At a low temperature, the likeliest character each time, as jaxgru writes it."""
        params, _, tokenizer = lm.load("elman_alpha")
        options = Options(num_tokens=30, temperature=0)
        wanted = "".join(lm.stream_text(params, tokenizer, "ROMEO: ", options))
        out = run(
            monkeypatch, capsys, "onnx_stream", "--model", "elman_alpha",
            "--num-tokens", 30, "--temperature", 1e-4,
        )  # fmt: skip
        assert out == f"{wanted}\n"

    def test_it_begins_as_jaxgru_sample_does(self, monkeypatch, capsys, tmp_path):
        """A model of another text may know no character of the default prompt."""
        config = lm.Config(model=lm.ModelConfig(vocab_size=2, hidden_dim=3))
        params = lm.init(jax.random.key(0), config.model)
        path = tmp_path / "m.safetensors"
        lm.save(path, params, config, CharacterTokenizer("ab"))
        out = run(monkeypatch, capsys, "onnx_stream", "--model", path, "--num-tokens", 3)
        assert len(out) == 5 and out[0] == "a"

    @pytest.mark.parametrize("prompt", [[], ["--prompt", "ab\r\nc"]])
    def test_a_line_ends_where_jaxgru_ends_it(self, monkeypatch, capsys, tmp_path, prompt):
        params, _, tokenizer = lines_model(tmp_path / "lines.safetensors")
        options = Options(num_tokens=99, temperature=0, separator="line")
        wanted = "".join(lm.stream_text(params, tokenizer, "".join(prompt[1:]), options))
        options = "--model", tmp_path / "lines.safetensors", "--num-tokens", 99, *prompt
        out = run(monkeypatch, capsys, "onnx_stream", *options, "--temperature", 1e-4)
        assert len(wanted) < 99 and out == f"{wanted}\n"
        run(monkeypatch, capsys, "onnx_stream", *options, "--page", tmp_path / "page")
        page = json.loads((tmp_path / "page" / "page.json").read_text())
        assert (page["prompt"][0], page["separator_token"]) == (0, 0)

    def test_the_page(self, monkeypatch, capsys, tmp_path):
        folder = tmp_path / "page"
        run(
            monkeypatch, capsys, "onnx_stream", "--model", "elman_alpha", "--page", folder,
            "--prompt", "JULIET: ", "--num-tokens", 30, "--temperature", 0.5,
        )  # fmt: skip
        _, _, tokenizer = lm.load("elman_alpha")
        assert {p.name for p in folder.iterdir()} == {"index.html", "model.onnx", "page.json"}
        assert json.loads((folder / "page.json").read_text()) == {
            "characters": tokenizer.pieces, "prompt": tokenizer.encode("JULIET: ").tolist(),
            "num_tokens": 30, "temperature": 0.5, "separator_token": None,
        }  # fmt: skip
        assert len((folder / "index.html").read_text().splitlines()) <= 41

    @needs_web
    @pytest.mark.skipif(
        not (ROOT / "playground/node_modules/playwright-core").is_dir()
        or not Path(CHROMIUM).is_file(),
        reason=f"needs `npm ci` in playground/ and Chromium ({CHROMIUM})",
    )
    @pytest.mark.parametrize("model", ["elman_alpha", "bengio_mlp"])
    def test_the_page_in_a_browser(self, monkeypatch, capsys, tmp_path, model):
        """It goes on from the prompt as jaxgru does, also with a carry of other sizes than (H,)."""
        run(
            monkeypatch, capsys, "onnx_stream", "--model", model, "--page", tmp_path,
            "--prompt", "\nJULIET: ", "--num-tokens", 30, "--temperature", 1e-4,
        )  # fmt: skip
        done = subprocess.run(
            ["node", "--input-type=module", "-e", OPEN_PAGE, tmp_path, NODE_MODULES],
            cwd=ROOT / "playground" / "tests-browser", capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        params, _, tokenizer = lm.load(model)
        options = Options(num_tokens=30, temperature=0)
        wanted = "".join(lm.stream_text(params, tokenizer, "\nJULIET: ", options))
        assert json.loads(done.stdout) == wanted


class TestSequenceLabelling:
    def test_a_word_alone_is_its_row_of_a_batch(self):
        """In the batch, other phonemes are its padding."""
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "embedding": jax.random.normal(keys[0], (10, 4)),
            "layers": jaxgru.init_stack("gru", keys[1], 4, 3, 2, bidirectional=True),
            "head": jax.random.normal(keys[2], (6, 3)),
        }
        ids = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
        scores = jax.jit(labelling.scores)
        batch = scores(params, ids, jnp.array([5, 2]))
        alone = scores(params, ids[1:, :2], jnp.array([2]))
        assert batch.shape == (2, 5, 3)
        np.testing.assert_allclose(batch[1, :2], alone[0], atol=1e-6)

    def test_the_short_words(self):
        """Some as the dictionary's file has them: AH0 B AW1 T, IH1 N T UW0, and AY1 AH0 W AH0."""
        said = set()
        for ids, lengths, tags in labelling.data(T=4):
            assert ((tags >= 0).sum(1) > 1).all() and (ids[lengths == 3, 3] == 0).all()
            for row, n in enumerate(lengths):
                pairs = zip(ids[row, :n], tags[row, :n], strict=True)
                said.add(" ".join(f"{labelling.PHONEMES[p]}{tag}" for p, tag in pairs))
        assert {"AH0 B-1 AW1 T-1", "IH1 N-1 T-1 UW0", "AY1 AH0 W-1 AH0"} < said

    def test_it_learns_more_than_counts(self):
        """On words of up to 6 phonemes that are new to both."""
        trained, (ids, lengths, tags) = labelling.data(T=6)
        params = labelling.train(trained, labelling.Settings(24, 1, 150))
        found = jax.jit(labelling.scores)(params, ids, lengths).argmax(-1)
        share = (np.array(found) == tags)[tags >= 0].mean()
        assert share > counted(trained, (ids, lengths, tags)) + 0.02

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys):
        """Its counts are those of a `Counter`."""
        out = run(monkeypatch, capsys, "sequence_labelling", "--steps", 200, "--num-layers", 1)
        counts, gru = re.findall(r"  ([\d.]+)%  ([\d.]+)%", out)
        assert float(counts[0]) == round(100 * counted(*labelling.data()), 1)
        assert float(gru[0]) > float(counts[0]) + 3 and float(gru[1]) > float(counts[1]) + 5


def counted(trained, new):
    """The share of tags that are the most frequent of a vowel, its place and their number."""

    def vowels(words):
        for ids, _, tags in zip(*(a.tolist() for a in words), strict=True):
            stressed = [(i, t) for i, t in zip(ids, tags, strict=True) if t >= 0]
            yield from (((i, n, len(stressed)), t) for n, (i, t) in enumerate(stressed))

    counts = defaultdict(Counter)
    for kind, tag in vowels(trained):
        counts[kind][tag] += 1
    return np.mean(
        [tag == max(range(3), key=counts[kind].__getitem__) for kind, tag in vowels(new)]
    )


class TestSequenceClassification:
    def test_the_head_reads_the_state_after_the_last_letter(self):
        """Step by step, without padding."""
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "embedding": jax.random.normal(keys[0], (10, 4)),
            "layers": jaxgru.init_stack("gru", keys[1], 4, 3, 2),
            "head": jax.random.normal(keys[2], (3, 8)),
        }
        ids = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
        lengths = (5, 2)
        batch = classification.scores(params, ids, jnp.array(lengths))
        for row, n in enumerate(lengths):
            carry = jaxgru.initial_carry(params["layers"], 1)
            for letter in ids[row, :n]:
                h, carry = jaxgru.step(params["layers"], params["embedding"][letter][None], carry)
            np.testing.assert_allclose(batch[row], h[0] @ params["head"], atol=1e-6)

    def test_it_learns_to_count(self):
        """Words of up to 6 letters that begin otherwise than those that it was trained on."""
        trained, (ids, lengths, syllables, words) = classification.data(T=6)
        _, _, trained_syllables, trained_words = trained
        known = dict(zip(trained_words, trained_syllables, strict=True))
        known |= dict(zip(words, syllables, strict=True))
        assert [known[word] for word in ("cat", "make", "about", "banana")] == [1, 1, 2, 3]
        assert not {word[:4] for word in words} & {word[:4] for word in trained_words}
        for row, word in enumerate(words[:100]):
            letters = [classification.LETTERS[i] for i in ids[row, : lengths[row]]]
            assert "".join(letters) == word
        params = classification.train(trained[:3], classification.Settings(32, 1, 200))
        found = jax.jit(classification.scores)(params, ids, lengths).argmax(-1)
        assert (found == syllables).mean() > (syllables == 2).mean() + 0.1

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys):
        out = run(monkeypatch, capsys, "sequence_classification", "--steps", 600)
        two, rule, gru = map(float, re.findall(r"([\d.]+)%", out))
        assert two < 50 and rule > 80 and gru > rule + 2


class TestRSSM:
    def test_an_episode_in_a_sequence_is_the_episode_alone(self):
        """From zeros, and without the action before it."""
        params = rssm.init(jax.random.key(0), 8)
        keys = jax.random.split(jax.random.key(1), 12)
        seen = rssm.play(jax.random.key(2), 3, 12)
        starts = jnp.zeros_like(seen.starts).at[jnp.array([0, 5, 6])].set(True)
        seen = seen._replace(action=jnp.ones_like(seen.action), starts=starts)
        whole = rssm.observe(params, seen, keys)
        for steps in (slice(5), slice(5, 6), slice(6, 12)):
            part, expected = jax.tree.map(operator.itemgetter(steps), (seen, whole))
            action = part.action.at[0].set(0)
            starts = jnp.zeros_like(part.starts)
            alone = part._replace(action=action, starts=starts)
            chex.assert_trees_all_close(
                rssm.observe(params, alone, keys[steps]), expected, atol=1e-5
            )

    def test_to_imagine_is_to_observe_with_the_prior(self):
        """A posterior that is the prior, blind to x, draws what is imagined."""
        params = rssm.init(jax.random.key(0), 8)
        keys = jax.random.split(jax.random.key(1), 12)
        W, V = params["prior"]
        blind = params | {"posterior": (jnp.pad(W, ((0, 1), (0, 0))), V)}
        seen = rssm.play(jax.random.key(2), 3, 12, ends=0)
        observed = h, z, _ = rssm.observe(blind, seen, keys)
        imagined = rssm.imagine(params, (h[3], z[3]), seen.action[4:], keys[4:])
        chex.assert_trees_all_close(imagined, tuple(a[4:] for a in observed), atol=1e-5)

    def test_the_core_is_the_guides(self):
        """With one group."""
        page = (ROOT / "docs" / "guide" / "custom_cell.md").read_text()
        blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        x = jax.random.normal(jax.random.key(0), (2, 5, 3))
        names = {**vars(rssm), "register": lambda init: init, "x": x, "starts": None}
        exec(next(block for block in blocks if "class DreamerCell" in block), names)
        theirs = names["init_dreamer_gru"](jax.random.key(1), 3, 4, num_groups=1)
        b, gain = jax.random.normal(jax.random.key(2), (2, 12))
        ours = rssm.DreamerCell(theirs.W[0], gain, b)
        y, expected = (jaxgru.unroll(p, x)[0] for p in (ours, theirs.replace(gain=gain, b=b)))
        np.testing.assert_allclose(y, expected, atol=1e-6)

    @pytest.mark.slow
    def test_it_learns_how_the_ball_moves(self):
        """It imagines better than from the last observation alone, and than that the ball stays.

        And the prior foretells z better than the frequencies of z do.
        """
        keys = jax.random.split(jax.random.key(0), 4)
        params = rssm.train(keys[0], 300, hidden_dim=32)
        world = rssm.play(keys[1], 200, rssm.PAST + rssm.FUTURE, ends=0)
        reset = world._replace(starts=jnp.ones_like(world.starts))
        imagined, alone = (rssm.futures(params, w, keys[2]).mean(-1) for w in (world, reset))

        def error(x):
            return jnp.square(x - world.position[rssm.PAST :])[:10].mean()

        assert error(imagined) < 0.9 * min(error(alone), error(world.x[rssm.PAST - 1]))
        h, _, posterior = rssm.observe(params, world, jax.random.split(keys[3], len(world.x)))
        p = jnp.exp(posterior)
        foretold = lambda log_q: (p * log_q).sum((-2, -1)).mean()
        frequencies = jnp.log(p.mean((0, 1)))
        assert foretold(rssm.log_p(params["prior"], h)) > foretold(frequencies)

    @pytest.mark.slow
    def test_the_command(self, monkeypatch, capsys, tmp_path, drawn):
        out = run(monkeypatch, capsys, "rssm", "--updates", 7, "--figure", tmp_path / "ball.svg")
        numbers = [re.findall(r"\d\.\d\d", line) for line in out.splitlines()[-3:]]
        assert "update     7" in out and [len(row) for row in numbers] == [5, 5, 5]
        assert (tmp_path / "ball.svg").stat().st_size > 5000
