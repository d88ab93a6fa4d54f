"""The settings of a worker that prepares no statements, as behind a pooler: a proxy can read them."""

from __future__ import annotations

from tests.support.worker_settings import *  # noqa: F403
from tests.support.worker_settings import DATABASES

for _database in DATABASES.values():
    _database["DISABLE_SERVER_SIDE_CURSORS"] = True
