"""Sphinx configuration: the site is built from stored notebook outputs and from the code, offline."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "_ext")]

project = "flash-attention-backend"
copyright = "the flash-attention-backend authors"
extensions = ["myst_nb", "generated_pages", "site_roles", "offline_math"]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]

# Notebooks show the outputs they were committed with; `make notebooks` refreshes those.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # the default loads require.js and a widget manager from a CDN
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "fa_ref and fa_fast"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
templates_path = []
pygments_style = "friendly"
pygments_dark_style = "monokai"
