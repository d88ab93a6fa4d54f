"""Names that the documentation uses before the code has them. Delete this file, and its uses, when it has."""

from __future__ import annotations

SETTINGS = {"CLAIM_AHEAD": 0.01}
