"""``/metrics`` of the door: what Prometheus reads there, and who may."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from django_delayq import schedule_message, schedule_messages
from django_delayq.contrib.prometheus.counts import MOST_QUEUES
from tests.http.conftest import Wire


@pytest.fixture
def published(wire: Wire) -> Wire:
    for _time in range(2):
        assert wire("PUT", "/api/ns1/q1?delay=60", b"x")[0] == 201
    schedule_message("t.ok", queue="secret", delay=60)
    return wire


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = text_string_to_metric_families(text)
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}


def test_prometheus_reads_the_numbers_of_a_namespace(published: Wire) -> None:
    answer = published.send("GET", "/metrics?namespace=ns1")
    assert (answer.status_code, answer["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert len(answer["X-Request-Id"]) == 26
    found = samples(answer.content.decode())
    assert found["delayq_scheduled_messages"] == [({"queue": "ns1.q1"}, 2.0)]
    assert found["delayq_database_up"] == [({}, 1.0)]
    assert {labels.get("queue", "ns1.q1") for each in found.values() for labels, _value in each} == {"ns1.q1"}
    assert b"secret" not in answer.content
    # The messages of other namespaces are in these.
    assert not {name for name in found if re.search("estimate|running|dead", name)}


def test_the_queues_of_other_namespaces_leave_room_for_those_of_one(published: Wire) -> None:
    schedule_messages([{"topic": "t.ok", "queue": f"a{number}.q", "delay": 60} for number in range(MOST_QUEUES)])
    found = samples(published.send("GET", "/metrics?namespace=ns1").content.decode())
    assert found["delayq_scheduled_messages"] == [({"queue": "ns1.q1"}, 2.0)]


def test_a_token_has_to_manage_the_namespace(published: Wire) -> None:
    assert published("GET", "/metrics") == (401, {"error": "invalid token"})
    assert published("GET", "/metrics?namespace=ns2") == (401, {"error": "invalid token"})
    assert published("GET", "/metrics?namespace=ns1", X_Token="") == (401, {"error": "token not found"})
    query = f"namespace=ns1&token={published.token}"
    assert published.send("GET", f"/metrics?{query}", X_Token="").status_code == 200


@pytest.mark.usefixtures("own_additions")
def test_without_the_app_there_is_nothing_for_anybody(published: Wire) -> None:
    for token in (published.token, "unknown", ""):
        assert published("GET", "/metrics?namespace=ns1", X_Token=token) == (404, {"error": "api not found"})
