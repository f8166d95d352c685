"""The site: MyST pages, notebooks and docstrings, by Sphinx (``make docs``)."""

from __future__ import annotations

import json
import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

import fedflat

project = "fedflat"
author = "the fedflat contributors"
release = version = fedflat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images"]
html_theme = "furo"
html_title = f"fedflat {version}"
html_copy_source = False
highlight_language = "none"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88


class Notebook(MystParser):
    """A notebook's cells as one page; nothing is executed (the tests do that)."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        cells = json.loads(inputstring)["cells"]
        texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
        super().parse("\n\n".join(f"```python\n{text}\n```" if code else text for text, code in texts), document)


def plain(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are prose with formulas: outside ``literals`` and examples, marks of markup are plain text."""
    example = False
    for place, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if example:
            continue
        parts = re.split(r"(``[^`]*``|:\w+:`[^`]*`)", line)
        parts[::2] = [re.sub(r"(?<!`)([*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
        lines[place] = "".join(parts)


def mathml(writer: Any, node: Any) -> None:
    """A formula as MathML, which browsers show by themselves: no script is fetched from anywhere."""
    block = isinstance(node, nodes.math_block)
    writer.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", plain, priority=900)  # after napoleon has found its sections
