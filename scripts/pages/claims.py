"""The study's claims, each with a function from the page to its verdict and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxgru.config import load_config
from jaxgru.runs.published import load_published

if TYPE_CHECKING:
    from pages.records import Run
    from pages.study_page import Page

BASELINES = ["bengio_mlp", "elman_alpha"]  # not of the study, for comparison
SIZE_FIELDS = {"model.hidden_dim", "model.num_layers"}

Verdict = tuple[str, str]
OPEN = "not measured yet", "–"


def _by_size(page: Page, family: str) -> list[Run]:
    """Return the first run of each size of a family that was trained, the smallest first."""
    names = (f"{family}_{size}" for size in ("alpha", "beta", "gamma"))
    return [page.first[name] for name in names if name in page.first]


def _bigram(page: Page) -> Verdict:
    if not page.alpha:
        return OPEN
    alpha, bigram = page.alpha.measured, page.bigram
    return "refuted: it is a first-order chain, but a worse one", (
        f"first order by construction; {alpha.chain.kl_to_bigram:.3f} nats from the counted bigram "
        f"on the training text; {alpha.stateless:.3f} against {bigram:.3f} on the validation split"
    )


def _one_epoch(page: Page) -> Verdict:
    rows = [
        (name, run.epochs[0].val_loss, run.measured.stateless, len(run.epochs))
        for name, run in page.first.items()
        if name not in BASELINES
    ]
    if not rows:
        return OPEN
    holds = all(once < stateless for _, once, stateless, _ in rows)
    return "supported" if holds else "refuted", "; ".join(
        f"{name}: {once:.3f} after 1 epoch with its state, {stateless:.3f} after {n} without"
        for name, once, stateless, n in rows
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
    runs = _by_size(page, "astra")
    sized = [r for r in page.sized if r.config == "astra_alpha" and len(r.changes) == 1]
    if len(runs) < 2:
        return OPEN
    costs = [run.measured.sensitivity for run in runs]
    numbers = ", ".join(f"{r.config} {c:.3f}" for r, c in zip(runs, costs, strict=True))
    for field, unit in (("model.hidden_dim", "units"), ("model.num_layers", "layers")):
        base = load_config("astra_alpha").model
        points = {getattr(base, field.removeprefix("model.")): page.alpha} if page.alpha else {}
        points |= {r.changes[field]: r for r in sized if field in r.changes}
        if len(points) > 1:
            numbers += "; astra_alpha with " + ", ".join(
                f"{value}: {points[value].measured.sensitivity:.3f}" for value in sorted(points)
            ) + f" {unit}"  # fmt: skip
    return "supported" if costs == sorted(costs) else "refuted", numbers


def _onset(page: Page) -> Verdict:
    parts, holds = [], True
    for family in ("astra", "scribe"):
        runs = _by_size(page, family)
        best = [run.best.epoch for run in runs]
        if len(runs) > 1:
            planned = [load_config(run.config).training.epochs for run in runs]
            shares = [epoch / n for epoch, n in zip(best, planned, strict=True)]
            holds &= shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
            parts += [f"{r.config} epoch {epoch} of {n}"
                      for r, epoch, n in zip(runs, best, planned, strict=True)]  # fmt: skip
    if not parts:
        return OPEN
    return ("supported" if holds else "refuted") + ", as far as measured", (
        "the validation loss is lowest after: " + ", ".join(parts)
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
    parts, holds = [], True
    for family in ("astra", "scribe"):
        runs = _by_size(page, family)
        losses = [run.measured.windows for run in runs]
        if len(runs) > 1:
            holds &= losses == sorted(losses, reverse=True)
            parts.append(", ".join(
                f"{r.config} {loss:.3f}" for r, loss in zip(runs, losses, strict=True)
            ))  # fmt: skip
    if not parts:
        return OPEN
    return ("supported" if holds else "refuted in general") + ", as far as measured", (
        "validation, windows of 128: " + "; ".join(parts)
    )


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
    ("Sensitivity grows with capacity", _capacity),
    ("Larger models overfit earlier (late, medium, early)", _onset),
    ("Leviathan is best within 3 epochs", _leviathan),
    ("Deeper and wider is better", _deeper),
    ("Dropout is applied between recurrent layers", _dropout),
]
