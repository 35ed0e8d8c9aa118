"""How the figures of all pages look: SVG that follows the reader's light or dark scheme.

A figure is drawn in the light scheme's colors. Its style sheet replaces them where the page is
dark: browsers tell an image which scheme the page around it has, on GitHub and on the site with its
own switch. Other viewers show the light figure. A figure has a background of its own, so that it
can be read wherever the two do not agree.

A figure is as wide as a telephone shows without shrinking its text, and text stays text, in the
reader's own font. The same figure is always the same file.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgru.lm.files import write_text

INK, GREY, LINE, BAND, PAPER = "#1f2328", "#59636e", "#d0d7de", "#eaeef2", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE = "#0969da", "#bc4c00", "#1a7f37", "#cf222e", "#8250df"
PALE = "#b6d4fe"
DARK = {
    INK: "#f0f6fc", GREY: "#9ea7b0", LINE: "#3d444d", BAND: "#262c36", PAPER: "#0d1117",
    BLUE: "#58a6ff", ORANGE: "#f0883e", GREEN: "#3fb950", RED: "#ff7b72", PURPLE: "#bc8cff",
    PALE: "#1f4a7d",
}  # fmt: skip
"""The colors of a figure, and what each becomes on a dark page."""

WIDTH = 5.2  # inches of all figures
SHOWN = 1.6  # pixels per point where there is room
FONTS = {
    "'DejaVu Sans Mono'": "ui-monospace, Consolas, 'DejaVu Sans Mono'",
    "'DejaVu Sans'": "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans'",
}
"""The fonts that texts are measured in, and those that they are shown in, which are narrower."""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Let matplotlib draw as the pages' figures are drawn."""
    import matplotlib  # takes long to import

    rules: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "jaxgru", "svg.id": None, "font.size": 10.5,
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
        "font.monospace": ["DejaVu Sans Mono"], "axes.titlesize": 13, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.titlepad": 10, "text.color": INK,
        "axes.edgecolor": GREY, "axes.grid.axis": "y",
        "axes.labelcolor": GREY, "axes.titlecolor": INK, "xtick.color": GREY, "ytick.color": GREY,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6, "lines.linewidth": 1.8,
        "figure.facecolor": PAPER, "axes.facecolor": "none", "legend.frameon": False,
        "figure.constrained_layout.h_pad": 0.1, "figure.constrained_layout.w_pad": 0.08,
        "xtick.minor.bottom": False, "ytick.minor.left": False,
        "axes.prop_cycle": f"cycler(color={[BLUE, ORANGE, GREEN, PURPLE, RED]})",
    }  # fmt: skip
    with matplotlib.rc_context(rules):
        yield


@contextlib.contextmanager
def svg(path: Path, height: float) -> Iterator[Any]:
    """Make a figure of this height in inches, and write it when the block ends.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        save_svg(figure, path)


def head(axes: Any, title: str, unit: str) -> None:
    """Write what a figure says above its axes, and what the y axis counts below that."""
    axes.set_title(title, pad=25)
    axes.annotate(unit, (0, 1), xytext=(0, 8), textcoords="offset points", color=GREY,
                  xycoords="axes fraction")  # fmt: skip


def beside(axes: Any, text: str, point: tuple[float, float], color: str, **options: Any) -> None:
    """Write a text to the right of a point, in the axes' own coordinates."""
    where = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, point, color=color, annotation_clip=False, **where | options)


def save_svg(figure: Any, path: Path) -> None:
    """Write a figure. Raises OSError where it cannot be written."""
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
    write_text(path, for_both_schemes(image.getvalue().decode()))


def for_both_schemes(image: str) -> str:
    """Return matplotlib's SVG with colors for dark pages, the reader's fonts and pixels."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in image
    )
    for measured, shown in FONTS.items():
        image = image.replace(measured, shown)
    sheet = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    image = re.sub(r"( <metadata>.*</metadata>)", f" {sheet}", image, flags=re.DOTALL)

    def pixels(found: re.Match) -> str:
        return f'{found[1]}="{SHOWN * float(found[2]):.0f}"'

    return re.sub(r'(\b(?:width|height))="([\d.]+)pt"', pixels, image)
