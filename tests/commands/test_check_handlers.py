"""``delayq_check handlers`` lists what this project handles, and warns of what nobody does."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from django_delayq import RetryPolicy, handler
from django_delayq.project import registry
from testproject.servers import PostgresServer
from tests.support.commands import run

pytestmark = pytest.mark.django_db(transaction=True)


def choose(attempt: int, error: BaseException | None) -> None:
    return None


async def wait(message: object) -> None: ...


@pytest.fixture(autouse=True)
def _handlers() -> None:
    """Have these handlers and no others."""
    registry.declared.clear()
    handler("a.plain")(_plain)
    terms: Any = {"retry": ["4m", 600], "timeout": "30s", "lease": "2m", "transactional": True, "queue": "mail"}
    handler("b.all", limit=5, rate="60/m", burst=3, limit_key=lambda message: None, **terms)(_plain_too)
    handler("c.own", retry=choose, timeout=False)(wait)
    handler("d.never", retry=RetryPolicy.never())(wait)


def _plain(message: object) -> None: ...


def _plain_too(message: object) -> None: ...


HERE = __name__


def test_every_handler_is_a_line_of_the_table() -> None:
    ran = run("delayq_check", "handlers")
    assert (ran.code, ran.err) == (0, "")
    retries = "after 10.0 s, × 2 each time, at most 1 h, 10 attempts"
    limits = "5 at once; one in 1.0 s, burst 3, each key"
    rows = [line.split("  ") for line in ran.out.splitlines()]
    assert [" | ".join(cell.strip() for cell in row if cell.strip()) for row in rows] == [
        "TOPIC | FUNCTION | QUEUE | RETRY | TIMEOUT | LEASE | LIMIT | TRANSACTIONAL",
        f"a.plain | {HERE}._plain | default | {retries} | 10 m | 1 m | none | no",
        f"b.all | {HERE}._plain_too | mail | after 4 m, 10 m | 30.0 s | 2 m | {limits} | yes",
        f"c.own | {HERE}.wait (async) | default | as choose says | none | 1 m | none | no",
        f"d.never | {HERE}.wait (async) | default | never | 10 m | 1 m | none | no",
    ]


def test_json_has_the_same_in_numbers() -> None:
    found = run("delayq_check", "handlers", "--json").json
    assert found["unhandled"] == []
    assert found["handlers"][1] == {
        "topic": "b.all",
        "function": f"{HERE}._plain_too",
        "async": False,
        "queue": "mail",
        "retry": {"fixed": [240.0, 600.0]},
        "timeout": 30.0,
        "lease": 120.0,
        "limit": {"count": 5, "interval": 1.0, "burst": 3},
        "limit_by_key": True,
        "transactional": True,
    }
    assert found["handlers"][2]["retry"] == "as choose says"


def test_the_limits_of_queues_are_a_table_of_their_own(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "LIMITS": {"reports": {"limit": 2}, "mail": {"rate": "60/m", "burst": 3}}}
    rows = [line.split("  ") for line in run("delayq_check", "handlers").out.partition("\n\n")[2].splitlines()]
    assert [" | ".join(cell.strip() for cell in row if cell.strip()) for row in rows] == [
        "QUEUE | LIMIT",
        "mail | one in 1.0 s, burst 3",
        "reports | 2 at once",
    ]
    assert run("delayq_check", "handlers", "--json").json["queue_limits"] == {
        "mail": {"count": None, "interval": 1.0, "burst": 3},
        "reports": {"count": 2, "interval": None, "burst": None},
    }


def test_a_policy_that_names_exceptions_is_told_in_words() -> None:
    handler("e.some", retry=RetryPolicy.fixed(["4m"], on=(OSError, KeyError), never=TimeoutError))(_plain)
    words = "after 4 m, on OSError, KeyError, never TimeoutError"
    assert run("delayq_check", "handlers", "--json").json["handlers"][-1]["retry"] == words
    assert words in run("delayq_check", "handlers").out


def test_a_project_without_handlers_is_told() -> None:
    registry.declared.clear()
    assert run("delayq_check", "handlers").out == "This project has no handlers.\n"


def test_handlers_are_listed_without_a_database(postgres_server: PostgresServer) -> None:
    connections["default"].close()
    postgres_server.kill()
    ran = run("delayq_check", "handlers", "--json")
    assert (ran.code, ran.json["unhandled"], len(ran.json["handlers"])) == (0, None, 4)
    assert "Waiting messages were not looked at" in ran.err
