"""Names that the documentation uses before the code has them. Delete this file, and its uses, when it has."""

from __future__ import annotations

from importlib.util import find_spec

HAS_CONSOLE = find_spec("django_delayq.console") is not None
SETTINGS = {"CLAIM_AHEAD": 0.01}
VERDICTS = {"GIVEN_UP"}
FIELDS = {"forgiven": "excused"}
