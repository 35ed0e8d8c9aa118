"""docs/study.md: its tables and its figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.analysis.measures import MEASURES
from pages.markdown import table
from pages.measurements import grouped
from study.figures import (
    MemoryCurve,
    Recovery,
    in_quarter_octaves,
    plot_epochs,
    plot_memory,
    plot_recovery,
    plot_sensitivity,
)
from study.study_records import Run, load_published

FILLED = 0.01  # nats per token above the stream; a state counts as filled below it
DRAWN_MEMORY = ("astra_alpha", "elman_alpha", "astra_gamma")  # with more, the lines overlap
DRAWN_RECOVERY = ("astra_alpha", "astra_gamma")
DISTANCES = (1, 4, 16, 32, 64, 128, 256)  # tokens between resets, in the table
WITHOUT_STATE = "bengio_mlp"  # its "reset" hides the characters before: another cost
SIZE_FIELDS = {"model.hidden_dim", "model.num_layers"}

COLUMNS = {name: measure.column for name, measure in MEASURES.items() if measure.column}
"""Of the table over seeds: the measures that have a column there, and what they are called."""

MODELS_HEAD = [
    "model",
    "parameters",
    "training loss, published",
    "ours",
    "state kept",
    "reset before every token",
    "cost",
    "minutes",
]
SEEDS_HEAD = ["run", "seeds", "training loss", *COLUMNS.values(), "full again after"]
NGRAMS_HEAD = ["tokens", *(f"n = {n}" for n in range(1, 9))]
TEXT_HEAD = [
    "model",
    "from bigram counts",
    "greedy text ends in",
    "known words: the text",
    "kept",
    "reset",
    "loop, kept",
]
NANOGPT_HEAD = ["model", "parameters", "last epoch", "best epoch"]

Row = list[Any]


class Page:
    """What the page shows of these runs.

    Args:
      runs: of each config and its changes, the lowest seed first.
      ngrams: by config, the losses of counted n-gram models, orders 1 to 8, nats per character.
    """

    def __init__(self, runs: Sequence[Run], ngrams: Mapping[str, list[float]]) -> None:
        self.groups = grouped(runs, lambda run: run.title)
        self.ngrams = ngrams
        self.first = {name: same[0] for name, same in self.groups.items() if not same[0].changes}

    def tables(self) -> dict[str, str]:
        """Return the page's tables by name."""
        runs = [*self.first.values()]
        memory_head = ["model", *(f"k = {k}" for k in DISTANCES), "never"]
        return {
            "models": table(MODELS_HEAD, map(self.in_short, runs), "lr"),
            "seeds": table(SEEDS_HEAD, map(self.over_seeds, self.groups)),
            "memory": table(memory_head, map(self.memory, runs)),
            "n-grams": table(NGRAMS_HEAD, self.counts()),
            "text": table(TEXT_HEAD, map(self.text, runs)),
            "as nanoGPT": table(NANOGPT_HEAD, self.as_nanogpt()),
        }

    def draw(self, figures: Path) -> None:
        """Draw every figure of the page."""
        memory = {name: memory_curve(self.first[name]) for name in DRAWN_MEMORY}
        plot_memory(figures / "memory.svg", memory, self.ngrams["astra_alpha"])
        recoveries = {name: recovery_of(self.first[name]) for name in DRAWN_RECOVERY}
        plot_recovery(figures / "recovery.svg", recoveries, FILLED)
        plot_sensitivity(figures / "sensitivity.svg", self.sensitivities())
        epochs = {
            name: [run.epochs for run in self.groups[name]]
            for name in self.first
            if load_published(name).train_loss
        }
        plot_epochs(figures / "epochs.svg", epochs)

    def sensitivities(self) -> dict[str, tuple[int, float]]:
        """Return parameters and the cost of a reset, nats per character, of configs and sizes."""
        points = {}
        for run, *_ in self.groups.values():
            if run.changes.keys() <= SIZE_FIELDS and run.config != WITHOUT_STATE:
                cost = run.measured.per_character(run.measured.sensitivity)
                points[run.title] = (run.parameters, cost)
        return points

    # --- Rows of tables

    def in_short(self, run: Run) -> Row:
        """Return a model's last training loss, its losses with and without its state, and its time.

        Those of training are in nats per token, the others in nats per character.
        """
        measured = run.measured
        theirs = [losses[-1] for losses in load_published(run.config).train_loss]
        published = ", ".join(f"{loss:.3f}" for loss in theirs if not math.isnan(loss))
        losses = (measured.stream, measured.stateless, measured.sensitivity)
        return [
            run.called,
            f"{run.parameters:,}",
            published or "–",
            f"{run.epochs[-1].train_loss:.3f}",
            *(f"{measured.per_character(loss):.3f}" for loss in losses),
            f"{minutes(run):.1f}",
        ]

    def over_seeds(self, title: str) -> Row:
        """Return the losses of a config and its changes over seeds, in nats per token."""
        runs = self.groups[title]
        training = [run.epochs[-1].train_loss for run in runs]
        measures = [[getattr(run.measured, name) for run in runs] for name in COLUMNS]
        return [
            runs[0].called,
            len(runs),
            *map(mean_and_range, [training, *measures]),
            ", ".join(str(first_below(run.measured.recovery)) for run in runs),
        ]

    def memory(self, run: Run) -> Row:
        """Return a model's loss by the number of tokens between resets, nats per character."""
        curve = dict(run.measured.memory_curve)
        losses = [*map(curve.__getitem__, DISTANCES), run.measured.stream]
        return [run.called, *(f"{run.measured.per_character(loss):.3f}" for loss in losses)]

    def counts(self) -> list[Row]:
        """Return the losses of counted n-grams: a row per kind of tokens."""
        kinds = {"astra_alpha": "characters", "scribe_alpha": "subwords"}
        return [
            [tokens, *(f"{loss:.3f}" for loss in self.ngrams[name])]
            for name, tokens in kinds.items()
        ]

    def text(self, run: Run) -> Row:
        """Return how a model writes: its chain without a state, known words, its greedy loop."""
        text = run.measured.text
        chain = run.measured.chain
        assert chain is not None  # no model of the study has so large a vocabulary
        cycle = max(chain.cycles, key=lambda cycle: cycle.basin)
        words = [text[how].known_words for how in ("validation text", "stateful", "stateless")]
        return [
            run.called,
            f"{chain.kl_to_bigram:.3f}",
            f"`{json.dumps(cycle.text)}` ({cycle.basin:.0%})",
            *(f"{share:.0%}" for share in words if share is not None),
            f"{text['stateful'].median_period:g}",
        ]

    def as_nanogpt(self) -> list[Row]:
        """Return a row per model that was evaluated on nanoGPT's protocol, over seeds."""
        rows = []
        for name, run in self.first.items():
            losses = [run.measured.random_batches for run in self.groups[name]]
            last = [loss.mean for loss in losses if loss]
            best = [loss.best.mean for loss in losses if loss and loss.best]
            if last and best:
                means = [mean_and_range(last), mean_and_range(best)]
                rows.append([run.called, f"{run.parameters:,}", *means])
        return rows


def memory_curve(run: Run) -> MemoryCurve:
    """Return what the figure of the memory shows of a run."""
    measured = run.measured
    points = [(k, measured.per_character(loss)) for k, loss in measured.memory_curve]
    return MemoryCurve(points, measured.per_character(measured.stream))


def recovery_of(run: Run) -> Recovery:
    """Return what the figure of the recovery shows of a run."""
    excess = run.measured.recovery
    return Recovery(excess, first_below(excess))


def minutes(run: Run) -> float:
    """Return the minutes of the run's steps if each epoch had taken the median one's time.

    So a run that was suspended for a while has the minutes of one that was not.
    """
    return len(run.epochs) * statistics.median(epoch.seconds for epoch in run.epochs) / 60


def first_below(excess: Sequence[float]) -> int | str:
    """Return after how many predictions the excess, as the figure has it, stays below FILLED."""
    above = [quarter for quarter in in_quarter_octaves(excess) if abs(quarter.mean) >= FILLED]
    last = above[-1].last if above else 0
    if last == len(excess):
        return f"more than {last}"
    return last


def mean_and_range(values: Sequence[Any]) -> str:
    """Format the mean and the range of values; None: a run was measured before there was one."""
    if None in values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} … {max(values):.3f})"
