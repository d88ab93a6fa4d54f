"""The check for django-health-check tells what ``delayq_check`` finds critical, and no more than its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils import timezone
from health_check.exceptions import ServiceUnavailable
from health_check.views import HealthCheckView

from django_delayq import pause_queue
from django_delayq.contrib.healthcheck import DelayqHealthCheck
from django_delayq.models import Worker
from testproject.servers import RedisServer
from tests.support.commands import schedule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]


@pytest.fixture(autouse=True)
def worker() -> None:
    now = timezone.now()
    Worker.objects.create(name="w", host="h", pid=1, started_at=now, seen_at=now)


def page(*checks: object) -> tuple[int, dict[str, str]]:
    """Ask for the page of these checks, and return its status and its answers."""
    view: Any = HealthCheckView.as_view(checks=checks)
    answer: HttpResponse = async_to_sync(view)(RequestFactory().get("/health/", {"format": "json"}))
    return answer.status_code, json.loads(answer.content)


def test_a_healthy_queue_passes() -> None:
    # A warning is no failure.
    pause_queue("default")
    status, answers = page("django_delayq.contrib.healthcheck.DelayqHealthCheck")
    assert status == 200
    assert list(answers.values()) == ["OK"]


def test_a_critical_finding_fails_by_its_name_alone(caplog: pytest.LogCaptureFixture) -> None:
    oldest = schedule(1, due=-90)[0]
    status, answers = page(("django_delayq.contrib.healthcheck.DelayqHealthCheck", {"min_workers": 2}))
    assert status == 500
    assert list(answers.values()) == ["Unavailable: critical: Workers, Overdue"]
    assert f"Overdue: message {oldest} of topic t.ok" in caplog.text


def test_the_limits_of_the_check_are_those_of_the_command() -> None:
    schedule(1, due=-90)
    with pytest.raises(ServiceUnavailable, match="Overdue"):
        DelayqHealthCheck().run()
    DelayqHealthCheck(max_overdue_age=3600).run()


def test_a_redis_that_is_away_fails(redis_client: redis.Redis, redis_server: RedisServer) -> None:
    redis_server.kill()
    with pytest.raises(ServiceUnavailable, match=r"critical: Redis$"):
        DelayqHealthCheck().run()
