"""The settings of ``tests.support.worker_settings`` with the hostile handlers.

DELAYQ_TEST_TIME_ZONE is the time zone of the sessions on PostgreSQL, where the server has another one.
"""

from __future__ import annotations

import os

from tests.settings import DATABASES
from tests.settings import INSTALLED_APPS as _APPS
from tests.support.worker_settings import *  # noqa: F403

INSTALLED_APPS = [*_APPS, "tests.support.hostile"]
if _zone := os.environ.get("DELAYQ_TEST_TIME_ZONE"):
    DATABASES["default"]["TIME_ZONE"] = _zone
