"""The settings of a worker that a test starts: those of the tests, with the test's DELAYQ. The worker ends with it."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.support.parent import end_with_parent

DELAYQ = json.loads(os.environ["DELAYQ_TEST_SETTINGS"])

# The worker ends with the test process, and its children with it.
end_with_parent()
