"""Configuration of Sphinx: ``tox -e docs``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Autodoc imports the models.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

import django  # noqa: E402

django.setup()

import django_delayq  # noqa: E402

project = "django-delayq"
author = "The django-delayq authors"
project_copyright = author
version = release = django_delayq.__version__

extensions = ["sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80

exclude_patterns = ["_build"]

html_theme = "furo"
html_title = project
# The host of the site says where the pages are, and where their source: "edit this page" is there only where it leads.
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
if repository := os.environ.get("READTHEDOCS_GIT_CLONE_URL"):
    html_theme_options = {
        "source_repository": repository.removesuffix(".git"),
        "source_branch": "main",
        "source_directory": "docs/",
    }
