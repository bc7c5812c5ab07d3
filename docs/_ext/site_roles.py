"""Two words the pages use: {nb}`09` links the notebook of that number, {picture} draws with fa_ref.show.

And long names in code may break after a dot, an underscore or a word, so that tables of names fit a page.

Notebooks are named by number because the number is what the text means; a number without a notebook is a warning, and
the build turns warnings into errors. Pictures are drawn when the site is built, so they show what the code does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pictures
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

LOGGER = logging.getLogger(__name__)


class NotebookRole(SphinxRole):
    """A link to notebooks/NN_*.ipynb, shown as NN."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        found = sorted(Path(self.env.srcdir, "notebooks").glob(f"{self.text}_*.ipynb"))
        if len(found) != 1:
            LOGGER.warning("%d notebooks have the number %s", len(found), self.text, location=self.get_location())
            return [nodes.Text(self.text)], []
        target = f"/notebooks/{found[0].stem}"
        link = addnodes.pending_xref(
            "", nodes.inline("", self.text), refdomain="std", reftype="doc", reftarget=target, refexplicit=True
        )
        link["refwarn"] = True
        self.set_source_info(link)
        link["refdoc"] = self.env.docname
        return [link], []


class PictureDirective(Directive):
    """The SVG of a function of docs/_ext/pictures.py, inside the page, so that its ink follows the theme."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        picture = getattr(pictures, self.arguments[0])()
        figure = nodes.container(classes=["picture"])
        figure += nodes.raw("", picture._repr_svg_(), format="html")
        return [figure]


def breakable(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Long names in code with places to break; <wbr> leaves no character behind when copied."""

    def broken(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"(?<=\w[._])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", match[2]) + match[3]

    context["body"] = re.sub(r'(<span class="pre">)([\w.]{16,})(</span>)', broken, context.get("body", ""))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("nb", NotebookRole())
    app.add_directive("picture", PictureDirective)
    app.connect("html-page-context", breakable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
