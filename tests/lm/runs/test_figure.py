"""The figure of a run: which losses it shows, and that two runs can be told apart."""

from __future__ import annotations

import math

from jaxgru.lm.runs import figure
from jaxgru.lm.runs.published import PublishedResults


def drawn(*arguments):
    """The lines that a figure would have: by their label, or by their place if they have none."""
    (axes,) = figure.losses_figure("a run", *arguments).axes
    return {line.get_label(): line for line in axes.get_lines()}


def test_the_losses_of_all_runs():
    published = PublishedResults(
        train_loss=[[2.5, math.nan]], val_loss=[[3.5, 3.25]],
        earlier_train_loss=[2.75, 2.25], earlier_val_loss=[3.75],
    )  # fmt: skip
    lines = drawn([[2.0, 1.5], [1.0]], [[3.0, 2.5], [2.0]], published)
    shown = {label: list(zip(*line.get_data(), strict=True)) for label, line in lines.items()}
    assert shown.pop("training, published")[0] == (1, 2.5)  # the second is not known
    assert shown == {
        "training": [(1, 2.0), (2, 1.5)],
        "_child1": [(1, 1.0)],
        "validation": [(1, 3.0), (2, 2.5)],
        "_child3": [(1, 2.0)],
        "training, earlier run": [(1, 2.75), (2, 2.25)],
        "one validation batch, published": [(1, 3.5), (2, 3.25)],
        "one validation batch, earlier run": [(1, 3.75)],
    }
    assert lines["_child1"].get_alpha() < lines["training"].get_alpha()


def test_a_run_that_nothing_was_published_of():
    lines = drawn([[2.0]], [[3.0]], PublishedResults())
    assert list(lines) == ["training", "validation"]
