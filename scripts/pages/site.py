"""What mkdocs.yml adds to MkDocs: equations in MathML, the fields of classes in the reference, and
the playground.

Browsers typeset MathML by themselves, so the site needs no JavaScript for its equations.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import griffe
from math_core import LatexToMathML

from jaxgru.cli.playground import served_files

EQUATION = re.compile(
    r'<(div|span) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>([.,:;)]*)', re.DOTALL
)
"""An equation, as marked by pymdownx.arithmatex, and the signs after it, on the same line."""

PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mo>′</mo></msup>")
"""h′. Fonts draw a prime small and high, but Chromium makes a superscript smaller and higher."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Leave out the navigation beside a page that is a tab by itself; MkDocs calls this hook."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]


def on_page_content(content: str, **_: Any) -> str:
    """Typeset the equations of a page; MkDocs calls this hook."""
    converter = LatexToMathML()

    def typeset(match: re.Match) -> str:
        element, latex, signs = match.groups()
        is_block = element == "div"
        math = converter.convert_with_local_state(html.unescape(latex), displaystyle=is_block)
        math = PRIME.sub(r'<mrow>\1<mo lspace="0" rspace="0">′</mo></mrow>', math)
        if is_block:
            return f'<div class="equation">{math}</div>{signs}'
        return f'<span class="inline-equation">{math}{signs}</span>'

    return EQUATION.sub(typeset, content)


def on_post_build(config: Any, **_: Any) -> None:
    """Put the playground in place of the page that describes it; MkDocs calls this hook."""
    target = Path(config["site_dir"]) / "playground"
    built = Path(config["config_file_path"]).parent / "playground" / "dist"
    if built.is_dir():
        shutil.copytree(built, target, dirs_exist_ok=True)
        return
    # Without Node, the site has what `jaxgru playground` serves.
    for place, path in served_files().items():
        if place != "/":
            copy = target / place[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


class Fields(griffe.Extension):
    """Show the signatures of structs, named tuples and configs, and the configs' help texts."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Complete what is known of a class from its code."""
        decorators = {str(decorator.value) for decorator in cls.decorators}
        bases = set(map(str, cls.bases))
        if cls.module.path == "jaxgru.lm.config" and "dataclass(frozen=True)" in decorators:
            _document(cls)
        elif "struct" not in decorators and "NamedTuple" not in bases:
            return
        cls.set_member("__init__", _init(cls))


def _document(cls: griffe.Class) -> None:
    """Give the fields made by `config._field` their defaults, and list their help texts."""
    config = getattr(importlib.import_module(cls.module.path), cls.name)
    lines = []
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            cls.members[field.name].value = repr(field.default)
            lines.append(f"    {field.name}: {config.help_of(field)}.")
    if lines and cls.docstring:
        cls.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)


def _init(cls: griffe.Class) -> griffe.Function:
    """Return the `__init__` that a class's decorator or base makes of its fields."""
    parameter = partial(griffe.Parameter, kind=griffe.ParameterKind.positional_or_keyword)
    parameters = [parameter("self")]
    for name, field in cls.attributes.items():
        if field.annotation is not None and "instance-attribute" in field.labels:  # no ClassVar
            default = _default(field.value)
            parameters.append(parameter(name, annotation=field.annotation, default=default))
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls)


def _default(value: Any) -> Any:
    """Return a field's default from its value, which is perhaps a call: field(default=…)."""
    if not isinstance(value, griffe.ExprCall):
        return value
    options = {getattr(a, "name", ""): getattr(a, "value", "") for a in value.arguments}
    return options.get("default", options.get("default_factory"))
