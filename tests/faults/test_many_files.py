"""A process with many files open uses Redis as any other: ``select`` names no descriptor of 1024 or more."""

from __future__ import annotations

import resource

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from tests.support.processes import Configure, Start
from tests.support.record_of import log_of, wait_until

MANY = 5000


@pytest.mark.skipif(
    0 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < MANY, reason="needs the right to open 5,000 files"
)
@pytest.mark.usefixtures("transactional_db", "redis_has_time", "redis_client")
def test_a_worker_with_many_files_open_takes_from_redis_and_is_woken_by_it(start: Start, configure: Configure) -> None:
    """Otherwise it would take Redis for away, or find messages by the sweep and by its own looks only."""
    configure(GRACE=60.0, POLL_INTERVAL=60.0)
    worker = start(prefix="env DJANGO_SETTINGS_MODULE=tests.support.many_files_settings")
    worker.wait_for("Loaded Redis")
    for delay in (0.0, 0.3, 0.0, 0.3):
        message = wait_until(schedule_message("t.tx", delay=delay), State.CONSUMED)
        assert log_of(message)[1].ready_at is not None
    assert worker.count("Redis is away") == 0, worker.log
    assert worker.count("sweep") == 0, worker.log
    assert worker.stop() == 0
