"""What the sentences of docs/study.md say of the runs: each is in the page as it is made here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxgru.analysis import state_cost
from study.published import load_published
from study.records import EarlyStopping, Run
from study.study_page import FILLED, Page, lowest_to_highest, per_character


def expected_sentences(page: Page) -> list[str]:
    """Return what the page says, with the numbers of the runs; nothing of runs that are missing."""
    said = [
        f"Measured {page.made}, on the machines",
        f"{state_cost.NUM_PROMPTS} prompts of {state_cost.PROMPT_LENGTH} tokens of the validation "
        f"split: {state_cost.GREEDY_TOKENS:,} greedy tokens per prompt for the loops, and "
        f"{state_cost.SAMPLED_TOKENS} tokens at temperature {state_cost.TEMPERATURE}, top-k "
        f"{state_cost.TOP_K} for",
        *(f"That of {name} learns more slowly" for name in page.slow),
        *_of_models(page),
        *_of_alpha(page),
        *_as_nanogpt(page),
        *_of_scribe(page),
        *_of_groups(page),
        *_of_dynamics(page),
    ]
    remembering = [  # from the 193rd prediction after a reset on
        f"{name} ({statistics.mean(excess[192:]):+.4f})"
        for name, excess in page.recoveries.items()
        if max(map(abs, excess[192:]), default=0) > 0.001
    ]
    if remembering:
        said.append(f"single losses of {' and '.join(remembering)} still differ from those")
    if page.stopping:
        said += _of_stopping(page, page.stopping)
    if "scribe_gamma" in page.slow:
        said += _of_first_steps(page, page.first["scribe_gamma"])
    return said


def _of_alpha(page: Page) -> Iterator[str]:
    """What a reset costs astra_alpha, in the first lines."""
    if not page.alpha:
        return
    alpha = page.alpha.measured
    curve, excess = dict(alpha.memory_curve), alpha.stateless - page.bigram
    yield (
        f"before every character costs astra_alpha **{alpha.sensitivity:.2f} nats per "
        f"character**: {alpha.stateless:.3f} instead of {alpha.stream:.3f}."
    )
    yield (
        f"astra_alpha is **{abs(excess):.2f} nats {'worse' if excess >= 0 else 'better'} than a "
        f"table of bigram counts** ({page.bigram:.3f})."
    )
    yield (
        f"{math.exp(-alpha.stream):.0%} on average if the state is kept and "
        f"{math.exp(-alpha.stateless):.0%} if it is reset"
    )
    filled = page.filled([page.alpha])
    yield f"{FILLED} nats of that of an unbroken stream after **{filled} characters**."
    yield f"(astra_alpha, seed {page.alpha.seed}), the same prompt `{state_cost.PROMPT}` and"
    known = [alpha.text[how].known_words for how in ("stateful", "stateless") if how in alpha.text]
    if len(known) == 2 and None not in known:
        yield (
            f"{known[0]:.0%} of the words that astra_alpha writes occur in the training text; with "
            f"a reset before every character, {known[1]:.0%}."
        )
    if 16 in curve:
        yield f"every 16 characters still costs **{curve[16] - alpha.stream:.2f}**. After a single"


def _of_models(page: Page) -> Iterator[str]:
    """What a reset costs the models of characters and those of subwords."""
    costs = {name: per_character(run, "sensitivity")[0] for name, run in page.first.items()}
    subwords = [cost for name, cost in costs.items() if name.startswith("scribe")]
    characters = [cost for name, cost in costs.items() if not name.startswith("scribe")]
    if characters and subwords:
        yield (
            f"costs the models of characters {min(characters):.2f} to {max(characters):.2f} nats "
            f"per character, and those of subwords {min(subwords):.2f} to {max(subwords):.2f}."
        )


def _as_nanogpt(page: Page) -> Iterator[str]:
    """The losses on nanoGPT's protocol, and how much the seeds of best_gru differ."""
    if losses := page.losses_as_nanogpt("astra_beta"):
        beta = lowest_to_highest(losses)
        yield f"It reaches {beta} nats per character, and the Transformer 1.461 to"
    if losses := page.losses_as_nanogpt("best_gru"):
        best, mean = lowest_to_highest(losses), statistics.mean(losses)
        streams = lowest_to_highest([run.measured.stream for run in page.of("best_gru")])
        yield f"parameters reaches {best}."
        yield (
            f"{best} nats per character on nanoGPT's test ({mean:.3f} in the mean over seeds), and "
            f"{streams} over the unbroken validation split."
        )


def _of_scribe(page: Page) -> Iterator[str]:
    for run in [run for name, run in page.first.items() if name.startswith("scribe")][:1]:
        length = run.measured.num_characters / run.measured.num_tokens
        yield f"Scribe's tokens are {length:.1f} characters long"


def _of_groups(page: Page) -> Iterator[str]:
    """What dropout, streams and bfloat16 cost or save, the mean over seeds."""
    groups: dict[Any, list[Run]] = page.dropouts()
    if "no dropout" in groups and "state, 0.1" in groups:
        cost = _mean("stream", groups["state, 0.1"]) - _mean("stream", groups["no dropout"])
        yield f"recurrence costs astra_alpha **{cost:.3f} nats per character** of"
    groups = page.batches()
    for rate, words in ((0.1, "With the study's dropout"), (0, "Without dropout")):
        if ("streams", rate) in groups and ("crops", rate) in groups:
            crops, streams = groups["crops", rate], groups["streams", rate]
            yield (
                f"{words}, streams are {_compared(streams, crops)}. A reset before every "
                f"character costs **{_mean('sensitivity', streams):.2f} nats per character** after "
                f"streams and {_mean('sensitivity', crops):.2f} after crops."
            )
    groups = page.precisions()
    if "float32" in groups and "bfloat16" in groups:
        words = _compared(groups["bfloat16"], groups["float32"], ", in the mean over seeds")
        yield f"Evaluated in float32, it is {words}."


def _of_dynamics(page: Page) -> Iterator[str]:
    """What a model gains that goes on learning as it reads, and what the state is worth to it."""
    if not page.dynamics:
        return
    gains = [r.per_character(r.static - r.dynamic) for r in page.dynamics]
    yield f"its loss falls by {min(gains):.2f} to {max(gains):.2f} nats per character"
    changes = {
        r.model: r.per_character(r.static) - per_character(page.first[r.model], "stream")[0]
        for r in page.dynamics
        if r.model in page.first
    }
    if {"scribe_gamma", "leviathan"} <= changes.keys():
        yield f"became {changes['scribe_gamma']:.3f} nats per character higher than"
        yield f"leviathan's {-changes['leviathan']:.3f} lower,"
    costs = [r.per_character(r.resets[0][2] - r.dynamic) for r in page.dynamics]
    yield f"loss stays {min(costs):.2f} to {max(costs):.2f} nats per character above its loss with"


def _mean(measure: str, runs: Sequence[Run]) -> float:
    """Return the mean of a measure over seeds, in nats per token."""
    return statistics.mean(getattr(run.measured, measure) for run in runs)


def _compared(one: Sequence[Run], other: Sequence[Run], mean: str = "") -> str:
    """Say by how much a group's loss is above another's, and whether seeds differ by more."""
    excess = _mean("stream", one) - _mean("stream", other)
    losses = [[run.measured.stream for run in runs] for runs in (one, other)]
    most = max(max(group) - min(group) for group in losses)
    words = f"**{abs(excess):.3f} nats per character {'worse' if excess > 0 else 'better'}**"
    if abs(excess) < 0.0005:
        words = "**equal, to 0.001 nats per character,**"
    beside = f" (seeds differ by up to {most:.3f})" if abs(excess) < most else ""
    return f"{words} with the state kept{mean}{beside}"


def _of_stopping(page: Page, stopping: EarlyStopping) -> Iterator[str]:
    """What is said of a run that was stopped early many times."""
    yield f"For subwords it is {stopping.noise:.2f}, measured below for {stopping.config}."
    yield (
        f"stop it {stopping.draws:,} times by one random batch per epoch, with the same patience "
        f"of {stopping.patience}. The noise of such a loss (standard deviation) is "
        f"{stopping.noise:.3f}."
    )
    if run := page.first.get(stopping.config):
        losses, ours = load_published(run.config).val_loss[0], run.best.epoch
        best = losses.index(min(losses)) + 1
        yield f"has its best epoch at {best} and stops at {len(losses)}; ours"
        yield f"at {ours} and {len(run.epochs)}."
        yield (
            f"Epoch {best} is the best in {stopping.share(best)} of the draws and epoch {ours} in "
            f"{stopping.share(ours)},"
        )


def _of_first_steps(page: Page, run: Run) -> Iterator[str]:
    """What is said of a Scribe model whose loss stays near that of the frequencies."""
    theirs = load_published(run.config)
    earlier, measured = theirs.earlier_train_loss, run.measured
    unigram = page.ngrams["scribe_alpha"][0] * measured.num_characters / measured.num_tokens
    yield f"Neither of our two trainings of seed {run.seed} reproduces"
    yield (
        f"frequency alone gives {unigram:.2f} on the validation split. Seed {run.seed}'s training "
        f"loss stays near this plateau in epoch 1 ({run.epochs[0].train_loss:.3f} on average)"
    )
    for p in page.by_recipe(run.config, "PyTorch"):
        if p.epochs:
            yield f"the PyTorch reference in epoch 1 ({p.epochs[0]:.3f}), with"
    yield (
        f"The published run has {theirs.train_loss[0][0]:.3f} in epoch 1, the earlier one "
        f"{earlier[0]:.3f}."
    )
    seeds = [p for p in page.by_recipe(run.config, "jaxgru") if p.constant]
    seeds.sort(key=lambda p: p.constant_at_first)
    if whole := [f"seed {p.seed} has {p.epochs[0]:.3f}" for p in seeds if p.epochs]:
        yield f"In epoch 1, {' and '.join(whole)}. They were chosen"
    most = sum(p.constant_at_first > 0.5 for p in seeds)
    if none := [f"seed {p.seed}" for p in seeds if p.constant_at_first == 0]:
        yield (
            f"Of {len(seeds)} seeds of ours, {most} have more than half of the units of layers 2 "
            f"to 4 constant, {' and '.join(none)} none."
        )
    late = [
        f"{p.losses[7]:.2f} with seed {p.seed} ({100 * p.constant_at_first:.0f}%)"
        for p in seeds
        if p.steps >= 200
    ]
    if late:
        yield f"In steps 176 to 200, the loss is {_listed(late)}."
    falling = [epoch.train_loss for epoch in run.epochs], theirs.train_loss[0], earlier
    between = [_epochs_between(losses, 4.5, 3.66) for losses in falling]
    yield f"of 4.5 to one of 3.66, seed {run.seed} takes {between[0]} epochs on"
    yield f"the published run {between[1]} and the earlier one {between[2]} ("


def _listed(items: Sequence[str]) -> str:
    """Join items with commas, and the last one with "and"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _epochs_between(losses: Sequence[float], high: float, low: float) -> str:
    """Return in how many epochs a falling loss goes from one value to another, along a line."""
    if losses[-1] > low:
        return f"more than {len(losses)}"
    corners = losses[::-1], range(len(losses), 0, -1)
    return f"{np.interp(low, *corners) - np.interp(high, *corners):.1f}"
