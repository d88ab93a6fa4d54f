"""Fixtures of the worker's tests."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.utils import timezone

from django_delayq.broker.keys import keys
from django_delayq.core.clock import to_tenths

if TYPE_CHECKING:
    import redis


@pytest.fixture
def loaded(redis_client: redis.Redis) -> None:
    """Load an empty Redis, as a worker does: it takes the ids of the next two hours from then on."""
    until = timezone.now() + timedelta(hours=2)
    redis_client.hset(keys("delayq", "").meta, "horizon", to_tenths(until))
