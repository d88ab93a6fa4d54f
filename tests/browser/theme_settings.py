"""The settings of a server process with a theme of the admin: DELAYQ_TEST_THEME names the app."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as OF_TESTS

INSTALLED_APPS = [os.environ["DELAYQ_TEST_THEME"], *OF_TESTS]
if os.environ["DELAYQ_TEST_THEME"] == "grappelli":
    ROOT_URLCONF = "tests.browser.theme_urls"
