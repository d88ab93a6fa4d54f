"""The door under ASGI: polls hold no thread, bodies are read up to their bound, and what nobody receives goes back."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_delayq.models import Message
from tests.http.conftest import Wire
from tests.http.servers import PROJECT, Server, answered
from tests.support.workers import eventually

# More than the threads of a server that has many polls need, whatever their number.
FEW = 20
POLLS = 200
MEBIBYTE = 1_048_576
NONE = (404, {"msg": "no job available"})


def test_polls_that_wait_hold_no_thread(asgi_server: Server) -> None:
    with contextlib.ExitStack() as opened:
        polls = [opened.enter_context(asgi_server.poll()) for _ in range(POLLS)]
        # The server has read the polls when it answers one that came later.
        assert asgi_server.ask("GET", "/api/ns1/q2?timeout=1") == NONE
        assert asgi_server.of_process("Threads") < FEW
        for number in range(3):
            assert asgi_server.ask("PUT", "/api/ns1/q1", b"%d" % number)[0] == 201
        eventually(lambda: len(select.select(polls, [], [], 0)[0]) == 3, "three jobs have come")
        for poll in polls:
            poll.shutdown(socket.SHUT_WR)
        jobs = [answer for poll in polls if (answer := answered(poll))]
    assert len(jobs) == 3
    assert all(b"200 OK" in job for job in jobs)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "a length"])
def test_a_body_that_is_too_large_is_not_read(asgi_server: Server, chunked: bool) -> None:
    assert asgi_server.ask("PUT", "/api/ns1/q1", b"x" * MEBIBYTE)[0] == 201
    before = asgi_server.of_process("VmRSS")
    framed = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {50 * MEBIBYTE}"
    head = f"PUT /api/ns1/q1 HTTP/1.1\r\nHost: x\r\nX-Token: {asgi_server.token}\r\n{framed}\r\n\r\n"
    part = b"x" * 65_536
    with asgi_server.send_raw(head.encode()) as opened:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50 * MEBIBYTE:
                opened.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                sent += len(part)
        answer = answered(opened)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":"body too large"}' in answer
    # The rest is what the buffers of both sockets hold.
    assert sent < 25 * MEBIBYTE
    assert asgi_server.of_process("VmRSS") - before < 8 * 1024
    assert Message.objects.count() == 1


def test_what_is_claimed_for_a_client_that_closes_just_then_goes_back(server: Server) -> None:
    """The client closes its side and a job comes at the same moment. Whoever has closed still reads what was sent."""
    for number in range(60):
        with server.poll() as poll:
            if number % 3:
                # The server has read the poll, and its client waits.
                assert server.ask("GET", "/api/ns1/q2") == NONE
            closing = threading.Timer(random.uniform(0, 0.02), poll.shutdown, (socket.SHUT_WR,))
            closing.start()
            status, job = server.ask("PUT", "/api/ns1/q1?tries=1", b"x")
            assert status == 201
            answer = answered(poll)
            closing.join()
        if answer:
            assert job["job_id"].encode() in answer
            assert Message.objects.get(state="running").deliveries == 1
        else:
            eventually(lambda: Message.objects.filter(state="scheduled", attempts=0).exists(), "it went back")
        assert server.ask("DELETE", f"/api/ns1/q1/job/{job['job_id']}")[0] == 204
        assert not Message.objects.filter(state__in=["scheduled", "running"]).exists()


def test_a_job_after_the_client_is_gone_is_for_others(asgi_server: Server) -> None:
    for _ in range(5):
        asgi_server.poll().close()
        assert asgi_server.ask("PUT", "/api/ns1/q1?tries=1", b"x")[0] == 201
        # It may have been claimed for the one who left, and is there again at once.
        status, job = asgi_server.ask("GET", "/api/ns1/q1?timeout=60")
        assert (status, job["remain_tries"]) == (200, 0)
        assert asgi_server.ask("DELETE", f"/api/ns1/q1/job/{job['job_id']}")[0] == 204


def test_the_project_answers_all_other_addresses(wire: Wire) -> None:
    with Server(token=wire.token, module=PROJECT) as server:
        assert server.ask("GET", "/version")[0] == 200
        with server.send_raw(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as opened:
            answer = answered(opened)
        assert b" 404 " in answer
        assert b"api not found" not in answer


@pytest.mark.postgresql("SQLite has no pools")
def test_threads_share_a_pool_of_connections(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg_pool")
    monkeypatch.setenv("DELAYQ_TEST_POOL", "2")
    with Server(token=wire.token, module=PROJECT) as server, ThreadPoolExecutor(8) as threads:
        statuses = threads.map(lambda _number: server.ask("PUT", "/api/ns1/q1", b"x")[0], range(40))
        assert [*statuses] == [201] * 40
