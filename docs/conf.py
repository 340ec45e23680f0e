"""Sphinx's configuration of the site: README.md, docs/, results/ and the public docstrings. `.ci/docs` builds it."""

import re

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import pflmpi

project, release, copyright = "pflmpi", pflmpi.__version__, "the pflmpi developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"pflmpi {release}"
html_copy_source = False
root_doc = "README"  # the source folder is the root of the project, so that links are those of a checkout
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "results/*.md", "configs/papers/README.md"]
myst_heading_anchors = 4  # for links such as configuration.md#validation
default_role = "code"  # of `names` in docstrings
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

CONTENTS = """
```{{toctree}}
:hidden:
{pages}
docs/api
```

```{{toctree}}
:hidden:
:glob:
:caption: Results
results/*
```

```{{toctree}}
:hidden:
:caption: Project
configs/papers/README
CONTRIBUTING
CHANGELOG
```
"""


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the contents to the README: the pages that its last section names, in that order."""
    if name == "README":
        pages = re.findall(r"\((docs/[\w-]+)\.md\)", source[0].partition("## Read on")[2])
        source[0] += CONTENTS.format(pages="\n".join(pages))


def read_sections(app: Sphinx, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Reads "Args:", "Raises:" and so on, in properties too, where the extension napoleon takes a colon for a type."""
    lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), what=what.replace("property", "method")).lines()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_sections)
