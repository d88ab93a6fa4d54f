"""The system checks, as ``manage.py check`` runs them."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.cache import caches
from django.core.checks import ERROR, run_checks
from django.db import connections, models
from django.test import override_settings

from django_delayq import handler
from django_delayq.project import registry
from tests.support.referring import ON_DELETE, known_model

LOCMEM = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
DJANGO_REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://nowhere.invalid:1/0"}


def found(**settings: Any) -> list[str]:
    with override_settings(**settings):
        messages = run_checks(tags=["delayq"])
    assert all(message.hint for message in messages)
    assert all(message.level == ERROR for message in messages)
    return sorted(str(message.id) for message in messages)


class ToNowhere:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "nowhere"


@pytest.mark.parametrize(
    ("leads", "circle"),
    [
        ({"a": "b", "b": "c"}, ""),
        ({"a": "b", "b": "c", "c": "b"}, "b, c"),
        ({"a": "b", "b": "c", "c": "a"}, "a, b, c"),
    ],
    ids=["a line", "a circle behind a line", "a circle"],
)
def test_handlers_that_lead_on_in_a_circle_are_refused(
    leads: dict[str, str], circle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "declared", {})
    for number, (topic, follows) in enumerate(leads.items()):
        options: Any = {"on_expired" if number % 2 else "on_dead": follows}
        handler(topic, **options)(lambda message: None)
    told = [(message.id, message.msg) for message in run_checks(tags=["delayq"])]
    assert told == (
        [("delayq.E015", f"Messages of {circle} would follow each other's ends without end.")] * bool(circle)
    )


def test_the_settings_of_a_project_pass_or_have_each_mistake_told() -> None:
    assert found() == found(DELAYQ={}) == []
    assert found(USE_TZ=False) == ["delayq.E005"]
    # A router that names no database keeps no mistake back.
    assert found(DATABASE_ROUTERS=[ToNowhere()], DELAYQ={"COLOUR": "red"}) == ["delayq.E002"]


@pytest.mark.parametrize(
    ("delayq", "ids"),
    [
        ("redis://", ["delayq.E001"]),
        (None, ["delayq.E001"]),
        ([], ["delayq.E001"]),
        ({"COLOUR": "red"}, ["delayq.E002"]),
        ({"LEASE": -1}, ["delayq.E003"]),
        ({"QUEUES": ["other"]}, ["delayq.E004"]),
        ({"PULL_QUEUES": ["a", "b.*"], "QUEUES": ["default"]}, []),
        ({"PULL_QUEUES": {"a": {"max_attempts": 9, "lease": "10m"}}}, []),
        ({"PULL_QUEUES": "a"}, ["delayq.E003"]),
        ({"PULL_QUEUES": ["*"]}, ["delayq.E003"]),
        ({"PULL_QUEUES": [None]}, ["delayq.E003"]),
        ({"PULL_QUEUES": {"a": {"retries": 9}}}, ["delayq.E003"]),
        ({"PULL_QUEUES": {"a": {"lease": 0}}}, ["delayq.E003"]),
        ({"PULL_QUEUES": ["b.*"], "QUEUES": ["default", "b.c"]}, ["delayq.E016"]),
        ({"QUEUES": ["fast", "slow"], "DEFAULT_QUEUE": "slow"}, []),
        ({"MIDDLEWARE": ["django_delayq.middleware.Middleware"]}, []),
        ({"MIDDLEWARE": ["django_delayq.middleware.Draft", "nowhere.Tenants"]}, ["delayq.E012", "delayq.E012"]),
        ({"REDIS": "http://localhost"}, ["delayq.E006"]),
        ({"REDIS": "redis://[::1"}, ["delayq.E006"]),
        ({"REDIS": "Redis://localhost:6379/0"}, ["delayq.E006"]),
        ({"REDIS": "default"}, ["delayq.E007"]),
        ({"REDIS": "nowhere"}, ["delayq.E007"]),
        ({"REDIS": "default", "LEASE": -1, "COLOUR": 1}, ["delayq.E002", "delayq.E003", "delayq.E007"]),
    ],
    ids=repr,
)
def test_each_mistake_has_its_id(delayq: Any, ids: list[str]) -> None:
    assert found(DELAYQ=delayq, CACHES=LOCMEM) == ids


@pytest.mark.parametrize("app", ["django_delayq", "django_delayq.console", "django_delayq.apps.DelayqConfig"])
def test_a_queue_in_the_schema_of_each_tenant_is_refused(app: str) -> None:
    assert found(TENANT_APPS=["shop", app]) == ["delayq.E014"]
    assert found(TENANT_TYPES={"public": {"APPS": [app]}, "shop": {"APPS": ["shop", app]}}) == ["delayq.E014"]
    assert found(TENANT_TYPES={"public": {"APPS": [app]}, "shop": {"APPS": ["shop"]}}) == []
    assert found(TENANT_APPS=["shop"], SHARED_APPS=[app]) == []


def test_a_deployment_with_the_settings_of_tests_is_warned() -> None:
    with override_settings(DELAYQ={"TESTING": "manual"}):
        assert run_checks(tags=["delayq"]) == []
        [warning] = run_checks(tags=["delayq"], include_deployment_checks=True)
    assert (warning.id, bool(warning.hint)) == ("delayq.W001", True)
    with override_settings(DELAYQ={"TESTING": None}):
        assert run_checks(tags=["delayq"], include_deployment_checks=True) == []


@pytest.mark.parametrize(
    ("delayq", "told"),
    [
        ({"PULL_QUEUES": ["bills.*"]}, ["handler of 'bills.send' has the queue 'bills.now'"]),
        ({"PULL_QUEUES": ["goods"], "LIMITS": {"goods": {"limit": 1}}}, ["a limit for the queue 'goods'"]),
        ({"PULL_QUEUES": ["bills"]}, []),
    ],
    ids=repr,
)
def test_a_handler_or_a_limit_of_a_pulled_queue_is_a_warning(
    delayq: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "declared", {})
    handler("bills.send", queue="bills.now")(lambda message: None)
    with override_settings(DELAYQ=delayq):
        found = run_checks(tags=["delayq"])
    assert [warning.id for warning in found] == ["delayq.W008"] * len(told)
    assert all(text in one.msg and one.hint for text, one in zip(told, found, strict=True))


@pytest.mark.parametrize(
    ("delayq", "told"),
    [
        ({"LIMITS": {"letters": {"limit": 1}, "lettres": {"limit": 1}}}, ["lettres"]),
        ({"QUEUES": ["default", "lettres"]}, ["letters"]),
        ({"QUEUES": ["default", "letters"], "LIMITS": {"lettres": {"limit": 1}}}, ["lettres"]),
        ({"LIMITS": {"tenant-1": {"limit": 1}}}, []),
        ({"QUEUES": ["default", "elsewhere"], "LIMITS": {"default": {"limit": 1}, "reports": {"limit": 1}}}, []),
    ],
    ids=repr,
)
def test_a_misspelt_queue_in_the_settings_is_a_warning(
    delayq: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "declared", {})
    handler("letters.send", queue="letters")(lambda message: None)
    handler("tenants.bill", queue="tenant-2")(lambda message: None)
    with override_settings(DELAYQ=delayq):
        found = run_checks(tags=["delayq"])
    assert [warning.id for warning in found] == ["delayq.W005"] * len(told)
    assert all(repr(name) in one.msg and "Did you mean" in str(one.hint) for name, one in zip(told, found, strict=True))


@pytest.mark.parametrize("name", ["RETENTION", "DEAD_RETENTION"])
@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        (30, True),
        ("59m", True),
        ("1h", False),
        (False, False),
        (-1, None),
        ("", None),
        ({"mail.*": 30}, True),
        ({"mail.*": "1h"}, False),
        ({"mail.*": 0}, None),
    ],
    ids=repr,
)
def test_a_history_that_is_deleted_within_an_hour_is_a_warning(name: str, value: Any, is_told: bool | None) -> None:
    with override_settings(DELAYQ={name: value}):
        messages = run_checks(tags=["delayq"])
    assert [message.id for message in messages] == (["delayq.E003"] if is_told is None else ["delayq.W006"] * is_told)
    assert all(name in message.msg and message.hint for message in messages)


LONG = "a" * 70
IMPOSSIBLE = {
    "redis://localhost:abc/0": "port",
    "redis://localhost:99999/0": "port",
    "redis://localhost:0/0": "port",
    "redis://localhost:6379/zero": "number of a database",
    "redis://localhost:6379/-1": "number of a database",
    "redis://localhost:6379/0?db=-1": "number of the database",
    "redis://localhost:6379/0?bogus=1": "'bogus'",
    "redis://localhost:6379/?db=y": "'db'",
    "unix:///run/redis.sock?db=y": "'db'",
    "unix://": "path of a socket",
    "redis://localhost/0?max_connections=-5": "max_connections",
    "rediss://localhost/0?ssl_cert_reqs=perhaps": "perhaps",
    f"redis://{LONG}.example/0": "host",
    "redis://redis..example/0": "host",
    "redis+cluster://h1:7000,h2:abc": "port",
    "redis+cluster://h1:7000,": "cannot be read",
    "rediss+cluster://h1,h2:0/0": "port",
    "redis+cluster://h1,h2/zero": "number of a database",
    "redis+cluster://h1,redis..example": "host",
    "redis+cluster://h1,h2/0?bogus=1": "'bogus'",
    "broken": "'colour'",
}
CACHE_OPTIONS = {"CONNECTION_POOL_KWARGS": {"colour": "red"}}


@pytest.mark.parametrize("redis", IMPOSSIBLE, ids=lambda url: url.replace(LONG, "long"))
def test_a_redis_to_which_no_connection_is_possible_is_e008(redis: str) -> None:
    broken = {**DJANGO_REDIS, "OPTIONS": CACHE_OPTIONS}
    with override_settings(DELAYQ={"REDIS": redis}, CACHES={**LOCMEM, "broken": broken}):
        (message,) = run_checks(tags=["delayq"])
    assert message.id == "delayq.E008"
    assert IMPOSSIBLE[redis] in str(message.hint)
    assert "\n" not in str(message.hint)


@pytest.mark.parametrize("options", [{"CONNECTION_POOL_CLASS": "nowhere.Pool"}, {"REDIS_CLIENT_CLASS": "os.nothing"}])
def test_a_cache_with_impossible_options_is_e008(options: Any) -> None:
    broken = {**LOCMEM, "broken": {**DJANGO_REDIS, "OPTIONS": options}}
    with override_settings(CACHES=broken):
        assert found(DELAYQ={"REDIS": "broken"}) == ["delayq.E008"]
        # Old releases of django-redis cannot close it, and the settings would stay as they are.
        del caches["broken"]


@pytest.mark.parametrize("url", [{}, {"url": "redis://localhost:1"}])
def test_a_cache_with_a_client_of_a_cluster_is_refused_in_words(url: Any) -> None:
    options = {"REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster", "REDIS_CLIENT_KWARGS": url}
    with override_settings(DELAYQ={"REDIS": "c"}, CACHES={**LOCMEM, "c": {**DJANGO_REDIS, "OPTIONS": options}}):
        (message,) = run_checks(tags=["delayq"])
    assert message.id == "delayq.E008"
    assert "nodes here instead, as in redis+cluster://host:port,host:port" in str(message.hint)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2/x@host:1/0",
        "redis://:hun#ter2@host/0",
        "redis://:1/hunter2@h",
        "http://user:hunter2@host",
        "redis+cluster://user:hunter2/x@h1:1,h2:2",
        "redis+cluster://:hun#ter2@h1,h2",
    ],
)
def test_a_part_of_a_password_is_never_taken_for_something_else_and_shown(url: str) -> None:
    with override_settings(DELAYQ={"REDIS": url}):
        messages = run_checks(tags=["delayq"])
    assert messages
    assert "hun" not in "".join(f"{message.msg} {message.hint}" for message in messages)


@pytest.mark.parametrize(
    "redis",
    [
        "redis://h:1/0",
        "rediss://u:p@h:1/0",
        "unix:///run/redis.sock?db=1",
        "fast",
        "redis+cluster://h1,h2:7000",
        "rediss+cluster://u:p%2C@[::1]:7000,h2/0?ssl_ca_certs=/ca.pem",
    ],
    ids=repr,
)
def test_a_redis_that_does_not_answer_passes_the_checks(redis: str) -> None:
    assert found(DELAYQ={"REDIS": redis}, CACHES={**LOCMEM, "fast": DJANGO_REDIS}) == []


@pytest.mark.parametrize(
    ("keeps_moments", "zone", "ids"),
    [
        (False, "Europe/Berlin", ["delayq.E010"]),
        (False, "Etc/UTC", []),
        (False, None, []),
        (True, "Europe/Berlin", []),
    ],
)
def test_a_database_that_keeps_local_times_needs_utc(
    monkeypatch: pytest.MonkeyPatch, keeps_moments: bool, zone: str | None, ids: list[str]
) -> None:
    connection = connections["default"]
    monkeypatch.setitem(connection.settings_dict, "TIME_ZONE", zone)
    monkeypatch.setattr(connection.features, "supports_timezones", keeps_moments)
    vars(connection).pop("timezone", None)
    try:
        assert found() == ids
    finally:
        vars(connection).pop("timezone", None)


@pytest.mark.parametrize("on_delete", ON_DELETE)
def test_a_foreign_key_to_messages_is_w004_if_the_database_refuses_to_delete_them(on_delete: str) -> None:
    with known_model(ON_DELETE[on_delete]):
        (message,) = run_checks(tags=["delayq"])
        assert (message.id, message.msg) == ("delayq.W004", "tests_app.Receipt.message is a foreign key to messages.")
    with known_model(ON_DELETE[on_delete], db_constraint=False):
        assert found() == []
    # Django 6.1 has keys that the database follows.
    if by_the_database := getattr(models, f"DB_{on_delete}", None):
        with known_model(by_the_database):
            assert found() == []
    assert found() == []
