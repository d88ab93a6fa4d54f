"""The door in a project that reads from a replica: it reads where it writes, for a replica lags behind."""

from __future__ import annotations

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_delayq.pull import ack, take
from tests.http.conftest import Wire
from tests.support.replica import REPLICA

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", REPLICA]),
    pytest.mark.usefixtures("read_from_a_replica"),
]


def test_the_door_and_programs_ask_no_replica(wire: Wire) -> None:
    with CaptureQueriesContext(connections[REPLICA]) as captured:
        job = wire("PUT", "/api/ns1/q1", b"x")[1]["job_id"]
        for path in ("peek", "size", f"job/{job}", "deadletter", "deadletter/size"):
            assert wire("GET", f"/api/ns1/q1/{path}")[0] == 200
        assert wire("GET", "/info?namespace=ns1")[0] == 200
        assert wire("GET", "/api/ns1/q1,q2")[0] == 200
        assert wire("PUT", f"/api/ns1/q1/job/{job}", b"y")[0] == 201
        (found,) = take("ns1.q1")
        assert ack(found.receipt)
        assert wire("DELETE", "/api/ns1/q1/deadletter")[0] == 204
    assert [query["sql"] for query in captured] == []
