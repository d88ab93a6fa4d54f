"""``delayq_http``: the door as a server by itself, as a real process."""

from __future__ import annotations

import base64
import json
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_delayq.http import jobs
from django_delayq.http.standalone import listen
from django_delayq.models import Message
from tests.http.conftest import Wire
from tests.http.servers import Server
from tests.support.commands import run
from tests.support.workers import PATIENCE

NONE = (404, {"msg": "no job available"})


def test_a_program_publishes_polls_and_acknowledges(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        poll = threads.submit(server.ask, "GET", "/api/ns1/q1?timeout=3600&ttr=60")
        status, published = server.ask("PUT", "/api/ns1/q1?tries=2", b"hello")
        assert (status, published["msg"]) == (201, "published")
        status, job = poll.result(PATIENCE)
    assert (status, job["job_id"], base64.b64decode(job["data"])) == (200, published["job_id"], b"hello")
    assert server.ask("DELETE", f"/api/ns1/q1/job/{job['job_id']}") == (204, None)
    assert Message.objects.get().state == "consumed"
    assert server.stop() == 0


def test_it_serves_the_door_and_nothing_else_of_the_project(server: Server) -> None:
    assert server.ask("GET", "/version")[0] == 200
    for path in ("/", "/admin/", "/nothing?x=1"):
        assert server.ask("GET", path) == (404, {"error": "api not found"})
    assert server.token not in server.log


def test_it_listens_at_this_host_only_unless_told_otherwise(server: Server, wire: Wire) -> None:
    # It is written as the socket has it.
    assert server.host == "127.0.0.1"
    with Server("--host", "0.0.0.0", token=wire.token) as other:
        assert other.host == "0.0.0.0"
        assert other.ask("GET", "/version")[0] == 200


def test_the_body_of_an_answer_waits_for_no_acknowledgement_of_its_head() -> None:
    with closing(listen("127.0.0.1", 0)) as listener, closing(socket.create_connection(listener.getsockname())):
        opened, _address = listener.accept()
        with closing(opened):
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_poll_that_waits_is_answered_when_a_signal_ends_the_server(server: Server, number: signal.Signals) -> None:
    connection = server.connect()
    with closing(connection):
        connection.request("GET", "/api/ns1/q1?timeout=3600", headers={"X-Token": server.token})
        # The server has read the poll when it answers one that came later.
        assert server.ask("GET", "/api/ns1/q2?timeout=1") == NONE
        server.send(number)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == NONE
    assert server.wait() == 0


def test_a_port_that_is_taken_and_one_that_is_none_are_errors(server: Server) -> None:
    taken = run("delayq_http", "--port", str(server.port))
    assert (taken.code, "Cannot listen at 127.0.0.1, port" in taken.err) == (1, True)
    assert run("delayq_http", "--host", "ü" * 70).code == 1
    assert "must be a whole number from 0 to 65535" in run("delayq_http", "--port", "65536").err


def test_it_serves_no_database_but_that_of_the_routers(wire: Wire) -> None:
    told = run("delayq_http", "--database", "other")
    assert (told.code, "default" in told.err) == (2, True)


def test_without_uvicorn_the_error_names_the_extra(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "django_delayq.http.standalone", raising=False)
    monkeypatch.delattr("django_delayq.http.standalone", raising=False)
    told = run("delayq_http")
    assert (told.code, "pip install 'django-delayq[http]'" in told.err) == (78, True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"TOPICS": ["ns1.q1"]}, "must be a dict of queue names and topics"),
        ({"TOPICS": {"ns1.q1": 7}}, "of queue 'ns1.q1'"),
        ({"TOPICS": {"ns1 q1": "orders"}}, "of queue 'ns1 q1'"),
        ({"TOPICS": {"ns1.q1": "no topic"}}, "of queue 'ns1.q1'"),
        ({"TOPIC": {}}, "TOPICS"),
        ("TOPICS", "TOPICS"),
    ],
    ids=repr,
)
def test_impossible_topics_are_found_by_the_checks(settings: Any, given: Any, named: str) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HTTP": given}
    (found,) = [each for each in checks.run_checks(tags=["delayq"]) if "'HTTP'" in str(each.msg)]
    assert named in str(found.hint)
    with pytest.raises(ImproperlyConfigured, match="HTTP"):
        jobs.topic_of("ns1.q1")
