"""The settings of a worker that sends each statement in words, as behind a pooler: a proxy can tell them apart."""

from __future__ import annotations

from tests.worker_settings import *  # noqa: F403
from tests.worker_settings import DATABASES

for _database in DATABASES.values():
    _database["DISABLE_SERVER_SIDE_CURSORS"] = True
