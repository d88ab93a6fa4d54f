"""The settings of ``tests.support.worker_settings``, with a cache alias behind the Sentinel of the test."""

from __future__ import annotations

import os

from tests.settings import CACHES as _CACHES
from tests.support.sentinel import FACTORY, guarded
from tests.support.worker_settings import *  # noqa: F403

DJANGO_REDIS_CONNECTION_FACTORY = FACTORY
CACHES = {**_CACHES, "guarded": guarded(int(os.environ["DELAYQ_TEST_SENTINEL"]))}
