"""Redis learns of every message although the process that scheduled it ends at once, in whatever way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings

from benchmarks.ends import CALLS, ENDS
from django_delayq.broker.keys import keys
from django_delayq.core.clock import SECOND
from django_delayq.models import Message
from tests.support.workers import PATIENCE, ROOT, eventually

if TYPE_CHECKING:
    import redis

pytestmark = pytest.mark.django_db(transaction=True)


# The server forgets the script of puts, so that it refuses the last one.
REFUSED = """
import django

django.setup()

from django_delayq import schedule_message
from django_delayq.broker import publisher

schedule_message("t.ok", delay=600)
broker = publisher.get("default").broker
broker.flush()
broker.client.script_flush()
schedule_message("t.ok", delay=600)
"""


def run(redis_client: redis.Redis, *words: str) -> None:
    """Run a process that schedules, with a Redis that takes messages of the next minutes."""
    time: Any = redis_client.time()
    redis_client.hset(keys("delayq", "default").meta, "horizon", (time[0] + 1000) * SECOND)
    subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "tests.support.worker_settings",
            "DELAYQ_TEST_SETTINGS": json.dumps(settings.DELAYQ),
            # No worker brings what a producer leaves out because Redis was too slow for it.
            "DELAYQ_TEST_PACE": json.dumps({"publisher.usual.timeout": PATIENCE / 3}),
        },
        check=True,
        timeout=250,
    )


def known(redis_client: redis.Redis) -> set[int]:
    members: Any = redis_client.zrange(keys("delayq", "default").delayed, 0, -1)
    return {int(member) for member in members}


def test_redis_knows_what_a_process_scheduled_right_before_its_end(redis_client: redis.Redis) -> None:
    run(redis_client, "-m", "benchmarks.ends", "--children", "t.ok", "--delay", "600")
    rows: Any = Message.objects.values_list("pk", "payload")
    scheduled = {pk: (payload["end"], payload["calls"]) for pk, payload in rows}
    assert Counter(scheduled.values()) == {(end, calls): calls for end in ENDS for calls in CALLS}
    # No worker runs, so nobody but those processes tells Redis. It may not have read what they sent last.
    eventually(lambda: not scheduled.keys() - known(redis_client), "Redis knows all of them")


def test_a_process_sends_its_last_put_again_that_was_refused(redis_client: redis.Redis) -> None:
    run(redis_client, "-c", REFUSED)
    scheduled = set(Message.objects.values_list("pk", flat=True))
    assert len(scheduled) == 2
    assert known(redis_client) == scheduled
