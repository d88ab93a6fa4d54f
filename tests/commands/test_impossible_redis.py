"""An impossible ``DELAYQ["REDIS"]``: commands end with one sentence, and calls raise before anything is written."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_delayq import cancel_message, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.management import commands
from django_delayq.models import Message
from tests.support.commands import calls_of, run, schedule

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def impossible(settings: Any) -> None:
    """A project with one of the URLs that ``tests/test_checks.py`` lists."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://localhost:abc/0"}


@pytest.mark.usefixtures("impossible")
@pytest.mark.parametrize("command", calls_of(commands), ids=" ".join)
def test_every_command_ends_with_one_sentence_and_exit_code_78(command: list[str]) -> None:
    ran = run(*command)
    assert ran.code == 78
    assert ran.err.startswith("DELAYQ['REDIS'] is impossible. ")
    assert "\n" not in ran.err.strip()
    assert ran.out == ""


def test_every_call_raises_before_anything_is_written(request: pytest.FixtureRequest) -> None:
    (pk,) = schedule(1)
    request.getfixturevalue("impossible")
    for call in (
        lambda: schedule_message("t.ok"),
        lambda: schedule_messages([{"topic": "t.ok"}]),
        lambda: cancel_message(pk),
    ):
        with pytest.raises(ImproperlyConfigured, match="DELAYQ\\['REDIS'\\] is impossible"):
            call()
    assert [message.state for message in Message.objects.all()] == [State.SCHEDULED]


@pytest.mark.parametrize(
    ("cache", "client", "told"),
    [
        ("django.core.cache.backends.redis.RedisCache", "", "The cache alias 'r' is none of django-redis with one"),
        ("django_redis.cache.RedisCache", "Shard", "The cache alias 'r' is none of django-redis with one"),
        ("django_redis.cache.RedisCache", "Sentinel", "django-redis refuses it: "),
        ("", "", "CACHES has no alias 'r'"),
    ],
)
def test_an_alias_that_is_no_cache_of_django_redis_is_told(settings: Any, cache: str, client: str, told: str) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "r"}
    options = {"OPTIONS": {"CLIENT_CLASS": f"django_redis.client.{client}Client"}} if client else {}
    made = {"r": {"BACKEND": cache, "LOCATION": "redis://localhost:6379/0", **options}} if cache else {}
    settings.CACHES = {**settings.CACHES, **made}
    ran = run("delayq_stats")
    assert ran.code == 78
    assert ran.err.startswith(f"DELAYQ['REDIS'] is impossible. {told}")
    assert "redis-py" not in ran.err


def test_a_package_that_is_missing_is_named(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://localhost:6379/0"}
    monkeypatch.setitem(sys.modules, "redis", None)
    ran = run("delayq_stats")
    assert ran.code == 78
    assert "The package redis is not installed" in ran.err
    with pytest.raises(ImproperlyConfigured, match="The package redis is not installed"):
        schedule_message("t.ok")
    assert not Message.objects.exists()
