"""The figure of a run: which losses it shows."""

from __future__ import annotations

import math

from jaxgru.lm.runs.reports import losses_figure


def drawn(*arguments):
    """The lines that a figure would have: by their label, or by their place if they have none."""
    (axes,) = losses_figure("a run", *arguments).axes
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def test_the_losses_of_a_run_beside_the_published_ones():
    published = {"train_loss": [[2.5, math.nan], [2.25]], "val_loss": [[3.5, 3.25]]}
    shown = drawn([2.0, 1.5], [3.0, 2.5], published)
    assert shown.pop("training, published")[0] == (1, 2.5)  # the second is not known
    assert shown == {
        "training": [(1, 2.0), (2, 1.5)],
        "validation": [(1, 3.0), (2, 2.5)],
        "_child3": [(1, 2.25)],
        "one validation batch, published": [(1, 3.5), (2, 3.25)],
    }


def test_a_run_that_nothing_was_published_of():
    assert list(drawn([2.0], [3.0], {})) == ["training", "validation"]


def test_epochs_are_whole_from_the_first_on():
    (axes,) = losses_figure("a run", [2.0], [3.0], {}).axes
    assert all(place == round(place) for place in axes.get_xticks())
