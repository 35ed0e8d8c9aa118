"""The study's claims, each with a function from the page to its verdict and numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxgru.lm.config import load_config
from study.published import load_published

if TYPE_CHECKING:
    from study.study_page import Page

BASELINES = ["bengio_mlp", "elman_alpha", "best_gru"]  # not of the study, for comparison
SIZE_FIELDS = {"model.hidden_dim", "model.num_layers"}

FEW = 2  # epochs: not the dozens of a claim
NEAR = 0.01  # nats per token above the lowest validation loss

Verdict = tuple[str, str]
OPEN = "not measured yet", "–"


def _sizes(family: str) -> list[str]:
    """Return the names of a family's models, the smallest first."""
    return [f"{family}_{size}" for size in ("alpha", "beta", "gamma")]


def _means(values: dict[str, list[float]]) -> str:
    return _numbers({name: statistics.mean(numbers) for name, numbers in values.items()})


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def _bigram(page: Page) -> Verdict:
    if not page.alpha or not (chain := page.alpha.measured.chain):
        return OPEN
    above = {name: run.measured.per_character(run.measured.stateless)
             - page.ngrams["scribe_alpha" if name.startswith("scribe") else "astra_alpha"][1]
             for name, run in page.first.items()}  # fmt: skip
    worse = all(excess > 0 for excess in above.values())
    return f"supported: first order; {'' if worse else 'not all are '}worse than bigram counts", (
        f"first order by construction; astra_alpha's chain is {chain.kl_to_bigram:.3f} nats from "
        "the bigram counts of the training text; the loss on the validation split exceeds that of "
        f"bigram counts of the same tokens by, in nats per character: {_numbers(above)}"
    )


def _one_epoch(page: Page) -> Verdict:
    runs = {name: run for name, run in page.first.items() if name not in BASELINES}
    if not runs:
        return OPEN
    fail = [name for name, run in runs.items() if run.epochs[0].val_loss >= run.measured.stateless]
    verdict = "refuted" if len(fail) == len(runs) else "supported"
    if fail and verdict == "supported":
        verdict += f" for all but {', '.join(fail)}"
    if few := [name for name, run in runs.items() if run.result_epoch <= FEW]:
        verdict += f"; barely tested with {', '.join(few)}: weights of epoch {FEW} or earlier"
    return verdict + _slow(page), ". ".join(
        f"{name}: {run.epochs[0].val_loss:.3f} with its state, trained for 1 epoch; "
        f"{run.measured.stateless:.3f} with resets, trained for {run.result_epoch}"
        for name, run in runs.items()
    )


def _subwords(page: Page) -> Verdict:
    pairs = [
        (a, s)
        for size in ("alpha", "beta", "gamma")
        if (a := page.first.get(f"astra_{size}")) and (s := page.first.get(f"scribe_{size}"))
    ]
    if not pairs:
        return OPEN
    numbers, refuted = [], True
    for a, s in pairs:
        by_token = a.measured.sensitivity, s.measured.sensitivity
        by_character = [r.measured.per_character(r.measured.sensitivity) for r in (a, s)]
        refuted &= by_token[1] < by_token[0] and by_character[1] < by_character[0]
        numbers.append(
            f"{a.config} {by_token[0]:.3f}, {s.config} {by_token[1]:.3f} nats per token and "
            f"{by_character[1]:.3f} per character"
        )
    return "refuted: they suffer less" if refuted else "supported", "; ".join(numbers)


def _capacity(page: Page) -> Verdict:
    """The study's table of the Astra models: "Moderate", "High", "Extreme"."""

    def costs(*names: str) -> dict[str, list[float]]:
        return {
            name: [run.measured.per_character(run.measured.sensitivity) for run in page.of(name)]
            for name in names
            if name in page.first
        }

    astra = costs(*_sizes("astra"))
    if len(astra) < 2:
        return OPEN
    numbers = "nats per character, the mean over seeds: " + _means(astra)
    sized = [r for r in page.sized if r.config == "astra_alpha" and len(r.changes) == 1]
    for field, unit in (("model.hidden_dim", "units"), ("model.num_layers", "layers")):
        base = load_config("astra_alpha").model
        points = {getattr(base, field.removeprefix("model.")): page.alpha} if page.alpha else {}
        points |= {r.changes[field]: r for r in sized if field in r.changes}
        if len(points) > 1:
            numbers += "; astra_alpha with " + ", ".join(
                f"{value}: {points[value].measured.sensitivity:.3f}" for value in sorted(points)
            ) + f" {unit}"  # fmt: skip
    if others := costs(*_sizes("scribe"), "leviathan"):
        numbers += "; others: " + _means(others)
    steps = {f"from {a} to {b}": _change(astra[a], astra[b]) for a, b in itertools.pairwise(astra)}
    if set(steps.values()) == {"grows"}:
        return "supported", numbers
    return ("supported in part: " if "grows" in steps.values() else "refuted: ") + "; ".join(
        f"{step}, it {change}" for step, change in steps.items() if change != "grows"
    ), numbers


def _change(before: list[float], after: list[float]) -> str:
    """Say whether a number grows from some seeds to others by more than seeds differ."""
    step = statistics.mean(after) - statistics.mean(before)
    if abs(step) <= max(max(seeds) - min(seeds) for seeds in (before, after)):
        return "changes by less than the seeds differ"
    return "grows" if step > 0 else "falls"


def _largest(page: Page) -> Verdict:
    """The study's section "Why Stateless Inference Fails Hardest at γ Scale"."""
    costs = {
        name: [run.measured.sensitivity for run in page.of(name)]
        for name in _sizes("scribe")
        if name in page.first
    }
    if len(costs) < 2 or "scribe_gamma" not in costs:
        return OPEN
    largest = max(costs, key=lambda name: statistics.mean(costs[name]))
    return ("supported" if largest == "scribe_gamma" else "refuted") + _slow(page), (
        "what a reset before every token costs, nats per token, the mean over seeds: "
        + _means(costs)
    )


def _onset(page: Page) -> Verdict:
    """The study's table that compares Leviathan with Astra-γ and Scribe-γ."""
    runs = [page.first[name] for name in ("astra_gamma", "scribe_gamma", "leviathan")
            if name in page.first]  # fmt: skip
    if len(runs) < 2:
        return OPEN
    steps = [run.best.step if run.best is not run.epochs[-1] else math.inf for run in runs]
    holds = steps == sorted(set(steps), reverse=True) and math.inf not in steps
    ours, theirs = [], []
    for run in runs:
        losses = {epoch.step: epoch.val_loss for epoch in run.epochs}
        near = [step for step, loss in losses.items() if loss < min(losses.values()) + NEAR]
        ours.append(
            f"{_lowest(run.config, losses)}, within {NEAR} of that loss from step {near[0]:,} on"
        )
        length = load_config(run.config).training.steps_per_epoch
        theirs += [
            _lowest(run.config, {length * (i + 1): loss for i, loss in enumerate(published)})
            for published in load_published(run.config).val_loss
        ]
    return ("supported" if holds else "refuted") + _slow(page), (
        f"overfitting begins where the validation loss is lowest: {'; '.join(ours)}. In the "
        f"study's own losses, each of one batch: {'; '.join(theirs)}"
    )


def _slow(page: Page) -> str:
    """Name the models that learn more slowly than published: their seed may decide a verdict."""
    return f"; our {', '.join(page.slow)} learns slowly" if page.slow else ""


def _lowest(name: str, losses: dict[int, float]) -> str:
    """Say after how many steps a model's loss is the lowest; NaN: not known."""
    last, best = max(losses), min(losses, key=lambda step: (math.isnan(losses[step]), losses[step]))
    if best == last:
        return f"{name} not within its {last:,} steps"
    return f"{name} after {best:,} of {last:,} steps"


def _leviathan(page: Page) -> Verdict:
    log = load_published("leviathan").val_loss[0]
    numbers = f"its own published log improves to epoch {log.index(min(log)) + 1} of {len(log)}"
    if run := page.first.get("leviathan"):
        best = run.best
        numbers += f"; ours to epoch {best.epoch} ({best.val_loss:.4f})"
        return "supported" if best.epoch <= 3 else "refuted", numbers
    return "refuted by the study's own log; not trained here yet", numbers


def _deeper(page: Page) -> Verdict:
    """Each family by itself; Leviathan, deeper and wider than all of Astra, beside them."""
    verdicts, parts = [], []
    for family in ("astra", "scribe"):
        losses = {name: page.first[name].measured.windows for name in _sizes(family)
                  if name in page.first}  # fmt: skip
        if len(losses) > 1:
            values = list(losses.values())
            better = values == sorted(values, reverse=True)
            verdicts.append(f"{'supported' if better else 'refuted'} for {family}")
            lowest = {name: _lowest_published(name) for name in losses}
            parts.append(
                f"{_numbers(losses)} (the study's lowest, of one batch: {_numbers(lowest)})"
            )
    if not parts:
        return OPEN
    if run := page.first.get("leviathan"):
        parts.append(f"leviathan {run.measured.windows:.3f}")
    return ", ".join(verdicts), ("validation loss per token, windows of 128: " + "; ".join(parts))


def _lowest_published(name: str) -> float:
    """Return the lowest validation loss of a model's published runs; NaN: not known."""
    return min(v for run in load_published(name).val_loss for v in run if not math.isnan(v))


def _dropout(page: Page) -> Verdict:
    between = page.variant({"training.dropout_site": "between"})
    if not (page.alpha and between):
        return OPEN
    published = load_published("astra_alpha").train_loss[0][-1]
    ours, theirs = (r.epochs[-1].train_loss for r in (page.alpha, between))
    return "refuted: it is inside the recurrence", (
        f"last training loss published {published:.3f}; measured {ours:.3f} inside the recurrence, "
        f"{theirs:.3f} between layers"
    )


def _scribe_sampling(page: Page) -> Verdict:
    return "refuted by the study's own code: it resets the state", (
        "its subword model's `forward` calls `layer(h)` without the state it is given; in a copy "
        "of that `forward`, logits with and without a state are bit-identical, and the greedy text "
        "is that of `generate(stateful=False)` (`parity_tests/test_sampling.py`)"
    )


CLAIMS: list[tuple[str, Callable[[Page], Verdict]]] = [
    ('Stateless sampling is equivalent to "a first-order Markov (bigram-like) model"', _bigram),
    ("One epoch with state beats dozens without", _one_epoch),
    ("Subword models suffer more", _subwords),
    ("The published stateful Scribe samples carry a state", _scribe_sampling),
    ("Sensitivity (of Astra) grows with capacity: Moderate, High, Extreme", _capacity),
    ('Stateless inference "fails hardest at γ scale" (of Scribe)', _largest),
    ("Astra-γ overfits late, Scribe-γ in between, Leviathan early", _onset),
    ("Leviathan is best within 3 epochs", _leviathan),
    ("Deeper and wider is better", _deeper),
    ("Dropout is applied between recurrent layers", _dropout),
]
