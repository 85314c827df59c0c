"""Sphinx configuration."""

from rlightning_groups import __version__

project = "rlightning_groups"
author = "The rlightning_groups developers"
copyright = f"2026, {author}"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
