"""The settings of ``tests.worker_settings`` with the hostile handlers."""

from __future__ import annotations

from tests.settings import INSTALLED_APPS as _APPS
from tests.worker_settings import *  # noqa: F403

INSTALLED_APPS = [*_APPS, "tests.hostile"]
