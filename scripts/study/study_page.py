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
from pages.records import grouped
from study.figures import (
    in_quarter_octaves,
    plot_epochs,
    plot_memory,
    plot_recovery,
    plot_sensitivity,
)
from study.records import Run, load_published

FILLED = 0.01  # nats per token above the stream; a state counts as filled below it
DRAWN_MEMORY = "astra_alpha", "elman_alpha", "astra_gamma"  # with more, the lines overlap
DRAWN_RECOVERY = "astra_alpha", "astra_gamma"
WITHOUT_STATE = "bengio_mlp"  # its "reset" hides the characters before: another cost
SIZE_FIELDS = {"model.hidden_dim", "model.num_layers"}

COLUMNS = {name: measure.column for name, measure in MEASURES.items() if measure.column}
"""Of the table over seeds: the measures that have a column there, and what they are called."""

Row = list[Any]


class Page:
    """What the page shows of these runs.

    Args:
      runs: of each config and its changes, the lowest seed first.
      ngrams: by config, the losses of counted n-gram models, orders 1 to 8, nats per character.
    """

    def __init__(self, runs: Sequence[Run], ngrams: Mapping[str, list[float]]) -> None:
        self.groups, self.ngrams = grouped(runs, lambda run: run.title), ngrams
        self.first = {name: same[0] for name, same in self.groups.items() if not same[0].changes}

    def tables(self) -> dict[str, str]:
        """Return the page's tables by name."""
        every = [k for k, _ in next(iter(self.first.values())).measured.memory_curve]
        return {
            "models": table(
                ["model", "parameters", "training loss, published", "ours", "state kept",
                 "reset before every token", "cost", "minutes"],
                map(self.in_short, self.first.values()), "lr"),
            "seeds": table(
                ["run", "seeds", "training loss", *COLUMNS.values(), "full again after"],
                map(self.over_seeds, self.groups)),
            "memory": table(
                ["model", *(f"k = {k}" for k in every), "never"],
                map(self.memory, self.first.values())),
            "n-grams": table(["tokens", *(f"n = {n}" for n in range(1, 9))], [
                [what, *(f"{loss:.3f}" for loss in self.ngrams[name])]
                for name, what in {"astra_alpha": "characters", "scribe_alpha": "subwords"}.items()
            ]),
            "text": table(
                ["model", "from bigram counts", "greedy text ends in", "known words: the text",
                 "kept", "reset", "loop, kept"], map(self.text, self.first.values())),
            "as nanoGPT": table(["model", "parameters", "last epoch", "best epoch"],
                                self.as_nanogpt()),
        }  # fmt: skip

    def draw(self, figures: Path) -> None:
        """Draw every figure of the page."""
        curves = {}
        for name in DRAWN_MEMORY:
            nats, measured = self.first[name].measured.per_character, self.first[name].measured
            points = [(k, nats(loss)) for k, loss in measured.memory_curve]
            curves[name] = points, nats(measured.stream)
        plot_memory(figures / "memory.svg", curves, self.ngrams["astra_alpha"])
        excess = {name: self.first[name].measured.recovery for name in DRAWN_RECOVERY}
        recoveries = {name: (values, first_below(values)) for name, values in excess.items()}
        plot_recovery(figures / "recovery.svg", recoveries, FILLED)
        sized = [
            run for run, *_ in self.groups.values()
            if run.changes.keys() <= SIZE_FIELDS and run.config != WITHOUT_STATE
        ]  # fmt: skip
        plot_sensitivity(figures / "sensitivity.svg", {
            run.title: (run.parameters, run.measured.per_character(run.measured.sensitivity))
            for run in sized
        })  # fmt: skip
        epochs = {
            name: [run.epochs for run in self.groups[name]]
            for name in self.first
            if load_published(name).train_loss
        }
        plot_epochs(figures / "epochs.svg", epochs)

    # --- Rows of tables

    def in_short(self, run: Run) -> Row:
        """Return a model's last training loss, its losses with and without its state, and its time.

        Those of training are in nats per token, the others in nats per character.
        """
        measured = run.measured
        theirs = [losses[-1] for losses in load_published(run.config).train_loss]
        published = ", ".join(f"{loss:.3f}" for loss in theirs if not math.isnan(loss))
        losses = measured.stream, measured.stateless, measured.sensitivity
        return [run.called, f"{run.parameters:,}", published or "–",
                f"{run.epochs[-1].train_loss:.3f}",
                *(f"{measured.per_character(loss):.3f}" for loss in losses),
                f"{minutes(run):.1f}"]  # fmt: skip

    def over_seeds(self, title: str) -> Row:
        """Return the losses of a config and its changes over seeds, in nats per token."""
        runs = self.groups[title]
        measures = [[getattr(run.measured, name) for run in runs] for name in COLUMNS]
        return [runs[0].called, len(runs),
                *map(mean_and_range, [[run.epochs[-1].train_loss for run in runs], *measures]),
                ", ".join(str(first_below(run.measured.recovery)) for run in runs)]  # fmt: skip

    def memory(self, run: Run) -> Row:
        """Return a model's loss by the number of tokens between resets, nats per character."""
        losses = [*(loss for _, loss in run.measured.memory_curve), run.measured.stream]
        return [run.called, *(f"{run.measured.per_character(loss):.3f}" for loss in losses)]

    def text(self, run: Run) -> Row:
        """Return how a model writes: its chain without a state, known words, its greedy loop."""
        text, chain = run.measured.text, run.measured.chain
        assert chain is not None  # no model of the study has so large a vocabulary
        cycle = max(chain.cycles, key=lambda cycle: cycle.basin)
        words = [text[how].known_words for how in ("validation text", "stateful", "stateless")]
        return [run.called, f"{chain.kl_to_bigram:.3f}",
                f"`{json.dumps(cycle.text)}` ({cycle.basin:.0%})",
                *(f"{share:.0%}" for share in words if share is not None),
                f"{text['stateful'].median_period:g}"]  # fmt: skip

    def as_nanogpt(self) -> list[Row]:
        """Return a row per model that was evaluated on nanoGPT's protocol, over seeds."""
        rows = []
        for name, run in self.first.items():
            losses = [loss for run in self.groups[name] if (loss := run.measured.random_batches)]
            best = [loss.best.mean for loss in losses if loss.best]
            if losses and best:
                means = mean_and_range([loss.mean for loss in losses]), mean_and_range(best)
                rows.append([run.called, f"{run.parameters:,}", *means])
        return rows


def minutes(run: Run) -> float:
    """Return the minutes of the run's steps if each epoch had taken the median one's time.

    So a run that was suspended for a while has the minutes of one that was not.
    """
    return len(run.epochs) * statistics.median(epoch.seconds for epoch in run.epochs) / 60


def first_below(excess: Sequence[float]) -> int | str:
    """Return after how many predictions the excess, as the figure has it, stays below FILLED."""
    above = [last for _, last, mean in in_quarter_octaves(excess) if abs(mean) >= FILLED]
    last = above[-1] if above else 0
    return last if last < len(excess) else f"more than {len(excess)}"


def mean_and_range(values: Sequence[Any]) -> str:
    """Format the mean and the range of values; None: a run was measured before there was one."""
    if None in values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} … {max(values):.3f})"
