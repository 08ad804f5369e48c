"""Sphinx's configuration of the documentation site; `make docs` builds it.

The source folder is the root of the repository, so that a link between pages is the same here and
in the repository.
"""

from pathlib import Path

project = "KVMesh"
html_title = "KVMesh"
root_doc = "docs/index"
extensions = ["myst_parser"]
include_patterns = ["docs/**", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build"]
source_suffix = {".md": "markdown"}

# A flag begins with two dashes.
smartquotes = False

# Anchors as those of GitHub, which the links of the repository use.
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static/scorer.js")
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
# Fonts and icons of the system: a page loads nothing from other servers.
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "default"
pygments_dark_style = "github-dark"
