"""The figures of docs/: the study's, the benchmark's, and how cost grows with size.

Each function draws one PNG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.runs.figure import save_figure

Points = Sequence[tuple[int, float]]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure  # takes long to import

    return Figure(figsize=(width, height), layout="constrained")


def plot_memory(
    path: Path, curves: Mapping[str, tuple[Points, float]], ngrams: Sequence[float]
) -> None:
    """Draw the loss of each model by the number of tokens k between resets of its state.

    Args:
      curves: by model, the losses by k and the loss without resets; nats per character.
      ngrams: the losses of counted n-gram models, orders 1, 2, …; nats per character.
    """
    figure = new_figure(8, 5)
    axes = figure.subplots()
    ticks = sorted({k for points, _ in curves.values() for k, _ in points})
    never = 2 ** (1 + ticks[-1].bit_length())
    for order, loss in list(enumerate(ngrams, 1))[1:]:  # order 1 is far above the rest
        if loss > ngrams[order - 2] - 0.03:
            break  # the lines would overlap
        name = {2: "counted bigram", 3: "trigram"}.get(order, f"{order}-gram")
        axes.axhline(loss, color="0.6", lw=0.8, ls="--", zorder=1)
        axes.annotate(name, (1, loss), xycoords=("axes fraction", "data"), xytext=(3, 0),
                      va="center", textcoords="offset points", fontsize=7,
                      color="0.35")  # fmt: skip
    for i, (name, (points, stream)) in enumerate(curves.items()):
        k, losses = zip(*points, strict=True)
        axes.plot([*k, never], [*losses, stream], color=f"C{i}", marker="o", ms=3.5, label=name)
    axes.set_xscale("log", base=2)
    names = ["1:\nstateless" if k == 1 else str(k) for k in ticks]
    axes.set_xticks([*ticks, never], [*names, "never"])
    axes.minorticks_off()
    axes.set(
        title="The loss of a recurrent model whose state is reset",
        xlabel="state reset to zero every … tokens",
        ylabel="loss on the validation split (nats per character)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_recovery(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw by how much a reset raises the loss, by the number of predictions since the reset.

    Args:
      curves: by model, the excess at the 1st, 2nd, … prediction after a reset; nats per token.
    """
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for i, (name, excess) in enumerate(curves.items()):
        axes.plot(range(1, len(excess) + 1), excess, color=f"C{i}", lw=1.2, label=name)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(max(map(len, curves.values())).bit_length())]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.axhline(0.01, color="0.6", lw=0.8, ls="--")
    axes.annotate("0.01", (0, 0.01), xycoords=("axes fraction", "data"), xytext=(4, 3),
                  textcoords="offset points", fontsize=7, color="0.35")  # fmt: skip
    axes.set(
        title="How long a state takes to fill: the cost of one reset",
        xlabel="predictions since the reset",
        ylabel="excess over the unbroken stream (nats per token)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_sensitivity(path: Path, points: Mapping[str, tuple[int, float, float]]) -> None:
    """Draw the stateful loss and the sensitivity against the number of parameters.

    Args:
      points: by model, parameters, the loss on one stream and the sensitivity; nats per character.
    """
    figure = new_figure(11, 4.5)
    for axes, column, title in zip(
        figure.subplots(1, 2),
        (2, 1),
        ("Sensitivity: stateless minus stateful", "Stateful: one unbroken stream"),
        strict=True,
    ):
        for i, (name, values) in enumerate(points.items()):
            style = {"color": f"C{i % 10}", "marker": "osD^vP*Xph"[i % 10], "alpha": 0.8}
            axes.plot(values[0], values[column], ls="", ms=7, label=name, **style)
        axes.set_xscale("log")
        axes.set(title=title, xlabel="parameters", ylabel="nats per character")
        axes.grid(alpha=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def plot_growth(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]], title: str
) -> None:
    """Draw a step's time and memory against each size, log-log.

    Args:
      panels: by axis label and by "seconds" or "bytes", two curves, plain and with remat (which may
        be empty): the measured value by size.
    """
    figure = new_figure(11, 6)
    units = {"seconds": ("milliseconds per step", 1e3), "bytes": ("megabytes", 1e-6)}
    grid = figure.subplots(2, len(panels), squeeze=False)
    for column, (label, measured) in enumerate(panels.items()):
        for row, (what, curves) in enumerate(measured.items()):
            axes, (unit, scale) = grid[row][column], units[what]
            for i, (values, name) in enumerate(zip(curves, ("plain", "remat"), strict=True)):
                if values:
                    y = [scale * value for value in values.values()]
                    axes.plot(list(values), y, color=f"C{i}", marker="o", ms=3.5, label=name)
            if curves[0]:  # proportional growth, through the last point
                first, last = min(curves[0]), max(curves[0])
                end = scale * curves[0][last]
                axes.plot([first, last], [end * first / last, end], color="0.6", lw=0.8, ls="--",
                          label="proportional", zorder=1)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(xlabel=label, ylabel=unit)
            axes.grid(alpha=0.2)
            if axes.lines:
                axes.legend(fontsize=8)
    figure.suptitle(f"A training step of astra_alpha: {title}", fontsize=10, parse_math=False)
    save_figure(figure, path)


def plot_benchmark(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]],
    order: Sequence[str],
) -> None:
    """Draw training steps as multiples of jaxgru's: a panel per machine, some bars per config.

    Args:
      panels: by title, contestant and config, the minimum, median and maximum seconds per step.
      order: all contestants, for the order and colours of the bars.
    """
    figure = new_figure(9, 4 * max(len(panels), 1))
    for i, (title, contestants) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, i + 1)
        configs = list(dict.fromkeys(c for times in contestants.values() for c in times))
        names = [name for name in order if name in contestants]
        families = list(dict.fromkeys(name.removesuffix("-one-device") for name in order))
        ours = {config: median for config, (_, median, _) in contestants.get("jaxgru", {}).items()}
        width = 0.8 / len(names)
        for j, name in enumerate(names):
            family = name.removesuffix("-one-device")
            times = [
                tuple(t / ours.get(config, t) for t in three)
                for config, three in contestants[name].items()
            ]
            axes.bar(
                [configs.index(c) + (j - (len(names) - 1) / 2) * width for c in contestants[name]],
                [median for _, median, _ in times],
                width,
                yerr=[[mid - low for low, mid, _ in times], [top - mid for _, mid, top in times]],
                error_kw={"lw": 0.6},
                color=f"C{families.index(family)}",
                alpha=1 if name == family else 0.5,
                label=name,
            )
        axes.axhline(1, color="0.35", lw=0.8)
        axes.set_xticks(range(len(configs)), configs, parse_math=False)
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.set_ylabel("time per step, as a multiple of jaxgru's")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, ncols=2)
    save_figure(figure, path)
