"""The study's claims, each with a function from the page to its verdict and numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxgru.config import load_config
from jaxgru.runs.published import load_published

if TYPE_CHECKING:
    from pages.study_page import Page

BASELINES = ["bengio_mlp", "elman_alpha"]  # not of the study, for comparison
SIZE_FIELDS = {"model.hidden_dim", "model.num_layers"}

Verdict = tuple[str, str]
OPEN = "not measured yet", "–"


def _sizes(family: str) -> list[str]:
    """Return the names of a family's models, the smallest first."""
    return [f"{family}_{size}" for size in ("alpha", "beta", "gamma")]


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def _bigram(page: Page) -> Verdict:
    if not page.alpha:
        return OPEN
    above = {name: run.measured.per_character(run.measured.stateless)
             - page.ngrams["scribe_alpha" if name.startswith("scribe") else "astra_alpha"][1]
             for name, run in page.first.items()}  # fmt: skip
    chain = page.alpha.measured.chain
    if not all(excess > 0 for excess in above.values()):
        return "refuted: not all are worse", _numbers(above)
    return "refuted: it is a first-order chain, but a worse one", (
        f"first order by construction; astra_alpha's is {chain.kl_to_bigram:.3f} nats from the "
        "counted bigram on the training text; on the validation split, these are worse than the "
        f"bigram of their tokens by, in nats per character: {_numbers(above)}"
    )


def _one_epoch(page: Page) -> Verdict:
    runs = {name: run for name, run in page.first.items() if name not in BASELINES}
    if not runs:
        return OPEN
    fail = [name for name, run in runs.items() if run.epochs[0].val_loss >= run.measured.stateless]
    verdict = "refuted" if len(fail) == len(runs) else "supported"
    if fail and verdict == "supported":
        verdict += f" for all but {', '.join(fail)}"
    return verdict, "; ".join(
        f"{name}: {run.epochs[0].val_loss:.3f} after 1 epoch with its state, "
        f"{run.measured.stateless:.3f} after {run.result_epoch} without"
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

    def costs(*names: str) -> dict[str, float]:
        return {
            name: statistics.mean(
                run.measured.per_character(run.measured.sensitivity) for run in page.of(name)
            )
            for name in names
            if name in page.first
        }

    astra = costs(*_sizes("astra"))
    if len(astra) < 2:
        return OPEN
    numbers = "nats per character, the mean over seeds: " + _numbers(astra)
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
        numbers += "; others: " + _numbers(others)
    values = list(astra.values())
    grows = [a < b for a, b in itertools.pairwise(values)]
    if all(grows):
        return "supported", numbers
    return "supported in part: not at every step" if any(grows) else "refuted", numbers


def _onset(page: Page) -> Verdict:
    """The study's table that compares Leviathan with Astra-γ and Scribe-γ."""
    runs = [page.first[name] for name in ("astra_gamma", "scribe_gamma", "leviathan")
            if name in page.first]  # fmt: skip
    if len(runs) < 2:
        return OPEN
    steps = [run.best.step if run.best is not run.epochs[-1] else math.inf for run in runs]
    holds = steps == sorted(set(steps), reverse=True) and math.inf not in steps
    parts = []
    for run, step in zip(runs, steps, strict=True):
        last = f"{run.epochs[-1].step:,} steps"
        at = f"not within its {last}" if step == math.inf else f"after {step:,} of {last}"
        parts.append(f"{run.config} {at}")
    return "supported" if holds else "refuted", (
        "overfitting begins where the validation loss is lowest: " + ", ".join(parts)
    )


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
            parts.append(_numbers(losses))
    if not parts:
        return OPEN
    if run := page.first.get("leviathan"):
        parts.append(f"leviathan {run.measured.windows:.3f}")
    return ", ".join(verdicts), ("validation loss per token, windows of 128: " + "; ".join(parts))


def _dropout(page: Page) -> Verdict:
    between = page.variant({"model.dropout_site": "between"})
    if not (page.alpha and between):
        return OPEN
    published = load_published("astra_alpha").train_loss[0][-1]
    ours, theirs = (r.epochs[-1].train_loss for r in (page.alpha, between))
    return "refuted: it is inside the recurrence", (
        f"last training loss published {published:.3f}; measured {ours:.3f} inside the recurrence, "
        f"{theirs:.3f} between layers"
    )


def _scribe_sampling(page: Page) -> Verdict:
    return "refuted by the study's own code: they are stateless", (
        "its subword model's `forward` calls `layer(h)` without the state it is given; logits with "
        "and without a state are bit-identical, and its greedy text is that of "
        "`generate(stateful=False)` (`parity_tests/test_sampling.py`)"
    )


CLAIMS: list[tuple[str, Callable[[Page], Verdict]]] = [
    ("Stateless sampling is equivalent to a bigram model", _bigram),
    ("One epoch with state beats dozens without", _one_epoch),
    ("Subword models suffer more", _subwords),
    ("The published stateful Scribe samples carry a state", _scribe_sampling),
    ("Sensitivity grows with capacity: Moderate, High, Extreme", _capacity),
    ("Astra-γ overfits late, Scribe-γ in between, Leviathan early", _onset),
    ("Leviathan is best within 3 epochs", _leviathan),
    ("Deeper and wider is better", _deeper),
    ("Dropout is applied between recurrent layers", _dropout),
]
