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

from jaxgru.files import write_text

INK = "#1f2328"
GREY = "#59636e"
LINE = "#d0d7de"
BAND = "#eaeef2"
PAPER = "#ffffff"
BLUE = "#0969da"
ORANGE = "#bc4c00"
GREEN = "#1a7f37"
RED = "#cf222e"
PURPLE = "#8250df"
PALE = "#b6d4fe"
DARK = {
    INK: "#f0f6fc",
    GREY: "#9ea7b0",
    LINE: "#3d444d",
    BAND: "#262c36",
    PAPER: "#0d1117",
    BLUE: "#58a6ff",
    ORANGE: "#f0883e",
    GREEN: "#3fb950",
    RED: "#ff7b72",
    PURPLE: "#bc8cff",
    PALE: "#1f4a7d",
}
"""The colors of a figure, and what each becomes on a dark page."""

WIDTH = 5.2  # inches of all figures
PIXELS_PER_POINT = 1.6  # where there is room
FONTS = {
    "'DejaVu Sans Mono'": "ui-monospace, Consolas, 'DejaVu Sans Mono'",
    "'DejaVu Sans'": "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans'",
}
"""The fonts that texts are measured in, and those that they are shown in, which are narrower."""


RULES: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxgru",
    "svg.id": None,
    "font.size": 10.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.monospace": ["DejaVu Sans Mono"],
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.08,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlecolor": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler(color={[BLUE, ORANGE, GREEN, PURPLE, RED]})",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}
"""How matplotlib draws the pages' figures."""


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Let matplotlib draw as the pages' figures are drawn."""
    import matplotlib  # takes long to import

    with matplotlib.rc_context(RULES):
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
    axes.annotate(
        unit,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color=GREY,
    )


def beside(axes: Any, text: str, point: tuple[float, float], color: str, **options: Any) -> None:
    """Write a text to the right of a point, in the axes' own coordinates."""
    defaults = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, point, color=color, annotation_clip=False, **defaults | options)


def save_svg(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
      OSError: the file cannot be written.
    """
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
    write_text(path, for_both_schemes(image.getvalue().decode()))


def for_both_schemes(image: str) -> str:
    """Return matplotlib's SVG with colors for dark pages, the reader's fonts and pixels."""
    rules = ""
    for light, dark in DARK.items():
        for what in ("fill", "stroke"):
            if f"{what}: {light}" in image:
                rules += f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
    for font_to_measure, font_to_show in FONTS.items():
        image = image.replace(font_to_measure, font_to_show)
    sheet = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    image = re.sub(r"( <metadata>.*</metadata>)", f" {sheet}", image, flags=re.DOTALL)

    def pixels(match: re.Match) -> str:
        return f'{match[1]}="{PIXELS_PER_POINT * float(match[2]):.0f}"'

    return re.sub(r'(\b(?:width|height))="([\d.]+)pt"', pixels, image)
