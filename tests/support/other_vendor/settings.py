"""The settings of the tests, with all data in a database of the other vendor."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403

DATABASES = {"default": {"ENGINE": "tests.support.other_vendor", "NAME": os.environ["DELAYQ_TEST_OTHER_VENDOR"]}}
