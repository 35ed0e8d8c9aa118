"""The figures of the pages: the same file each time, with a dark color for each light one."""

import re

import pytest

from pages import figures
from pages.markdown import DOCS, ROOT

FIGURES = sorted((DOCS / "figures").rglob("*.svg"))
COLOR = re.compile(r"(?:fill|stroke): (#[0-9a-f]{6})")


def test_a_figure_is_for_both_schemes_and_always_the_same(tmp_path, drawn):
    images = []
    for name in "ab":
        with figures.svg(tmp_path / name, height=2) as figure:
            figure.subplots().plot([1, 2], color=figures.RED)
        images.append((tmp_path / name).read_text())
    assert images[0] == images[1]
    # 5.2 × 2 inches of 72 points, and 1.6 pixels a point
    assert 'width="599" height="230" viewBox="0 0 374.4 144"' in images[0]
    assert '[style*="stroke: #cf222e"]{stroke:#ff7b72 !important}' in images[0]
    assert "<text" in images[0] and "metadata" not in images[0]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_the_ones_in_docs(path):
    text = path.read_text()
    assert set(COLOR.findall(text)) <= figures.DARK.keys() and len(text) < 120_000
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert any(f"figures/{path.relative_to(DOCS / 'figures')})" in p.read_text() for p in pages)
