"""The bench for the script tests."""

from __future__ import annotations

import pytest
import redis

from .bench import Bench


@pytest.fixture
def bench(redis_client: redis.Redis) -> Bench:
    return Bench(redis_client)
