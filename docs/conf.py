"""How Sphinx makes the site of these pages: `make site`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import gshard


def _tags(*which: str) -> list[str]:
    done = subprocess.run(["git", "tag", *which], capture_output=True, cwd=Path(__file__).parent)
    return done.stdout.decode().split()


project = "gshard"
author = "The gshard authors"
release = gshard.__version__
extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["README.md", "_build", "results/figure"]  # README.md is the index on GitHub

html_theme = "sphinx_book_theme"
html_title = f"gshard {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": True,  # the page's own Markdown or notebook
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
}
# With an address under [project.urls], pages link to their source, and notebooks open in Colab.
_urls = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]
if repository := _urls.get("Repository"):
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",  # in Colab's addresses too, which are else of `master`
        "path_to_docs": "docs",
        "use_source_button": True,
        "use_edit_page_button": True,
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }
# With one of the documentation, its versions are folders there, one for each tag, and a list of
# them is built next to the site: build/versions.json, to be put where the folders are.
if documentation := _urls.get("Documentation"):
    html_theme_options["switcher"] = {
        "json_url": f"{documentation.rstrip('/')}/versions.json",
        "version_match": release if f"v{release}" in _tags("--points-at", "HEAD") else "dev",
    }
    html_theme_options["primary_sidebar_end"] = ["version-switcher"]
copybutton_prompt_text = "$ "
# Paths to files outside of docs/ are downloads, and headings have addresses.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # tests/test_notebooks.py runs them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"
napoleon_google_docstring = True

# JAX publishes its inventory of names on the web alone: links to its objects where there is one.
if os.environ.get("GSHARD_SITE_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
    }

PLURAL = re.compile(r"(`[^`]+`)(?=\w)")
FENCE = re.compile(r"^(\s*)```(\w*)$")


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written in Markdown: fenced blocks become those of reStructuredText."""
    made: list[str] = []
    inside = False
    for line in lines:
        fence = FENCE.match(line)
        if fence is None:
            # A letter right after a literal, as in `array`s, needs a mark between them.
            made.append(f"    {line}" if inside and line.strip() else PLURAL.sub(r"\1\\ ", line))
        elif inside:
            inside = False
            made.append("")
        else:
            inside = True
            made += ["", f"{fence[1]}.. code-block:: {fence[2] or 'text'}", ""]
    lines[:] = made


def versions(tags: list[str], address: str) -> list[dict[str, Any]]:
    """The list that the site's menu of versions reads: releases, the newest first, and dev."""
    numbers = [re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", tag) for tag in tags]
    released = sorted((tuple(map(int, n.groups())) for n in numbers if n), reverse=True)
    names = [".".join(map(str, number)) for number in released]
    found: list[dict[str, Any]] = [
        {"name": name, "version": name, "url": f"{address.rstrip('/')}/{name}/"}
        for name in (*names, "dev")
    ]
    found[0]["preferred"] = True  # others say that it is newer
    return found


def list_versions(app: Any, error: Exception | None) -> None:
    """Write versions.json, if the documentation has an address."""
    if error is None and documentation:
        listed = json.dumps(versions(_tags(), documentation), indent=1)
        Path(app.outdir).with_name("versions.json").write_text(listed)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # before napoleon's
    app.connect("build-finished", list_versions)
