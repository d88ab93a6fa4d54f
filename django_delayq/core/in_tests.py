"""What tests put in the place of parts of this package. Only they and ``django_delayq.testing`` set anything here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

# Returns the time by the record's clock. None: the database's clock counts.
clock: Callable[[], datetime] | None = None
# There is no Redis, whatever the project's settings say.
without_redis = False
# Runs messages, by database alias and ids, at the end of the call that made them wait. None: workers deliver them.
run_at_once: Callable[[str, Sequence[int]], None] | None = None
# Is called with the name of each failpoint that the process reaches: ``core/failpoints.py``.
failpoint: Callable[[str], None] | None = None
