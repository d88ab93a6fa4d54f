"""Requests as no client sends them: each gets a clear status, and the server serves the next one."""

from __future__ import annotations

import contextlib
import re

import pytest

from django_delayq.models import Message
from tests.http.conftest import Wire
from tests.http.servers import PROJECT, Server, answered

Q = "/api/ns1/q1"


def request(start: str, *headers: str, body: str = "") -> bytes:
    lines = [f"{start} HTTP/1.1", "Host: localhost", *headers, "Connection: close", "", body]
    return "\r\n".join(lines).encode("latin-1")


# What is sent, with TOKEN for the token, and the statuses that are right.
TRICKS = {
    "a slash that is encoded": (request("PUT /api/ns1/q1%2Fjob", "X-Token: TOKEN"), {404}),
    "dots": (request("PUT /api/ns1/..", "X-Token: TOKEN"), {400}),
    "dots that are encoded": (request("PUT /api/%2e%2e/q1", "X-Token: TOKEN"), {400}),
    "dots in between": (request("PUT /api/ns1/../ns1/q1", "X-Token: TOKEN"), {404}),
    "NUL in a queue": (request("PUT /api/ns1/q%00", "X-Token: TOKEN"), {400}),
    "NUL in a namespace": (request("PUT /api/%00/q1", "X-Token: TOKEN"), {400}),
    "NUL in a job": (request("DELETE /api/ns1/q1/job/%00", "X-Token: TOKEN"), {204}),
    "NUL in a number": (request(f"PUT {Q}?delay=%00", "X-Token: TOKEN"), {400}),
    "NUL in a token": (request(f"PUT {Q}?token=a%00b"), {401}),
    "NUL in info": (request("GET /info?namespace=%00", "X-Token: TOKEN"), {401}),
    "a raw NUL in a header": (request(f"PUT {Q}", "X-Token: TOKEN\0"), {400, 401}),
    "double slashes": (request("PUT //api//ns1//q1", "X-Token: TOKEN"), {404}),
    "a backslash": (request("PUT /api\\ns1\\q1", "X-Token: TOKEN"), {400, 404}),
    "bytes that are no text": (request("PUT /api/ns1/q\xff", "X-Token: TOKEN"), {400, 404}),
    "a query that is no text": (request(f"PUT {Q}?delay=\xff", "X-Token: TOKEN"), {400}),
    "an absolute address": (request("PUT http://evil.example/api/ns1/q1", "X-Token: TOKEN"), {400, 404}),
    "a long path": (request(f"PUT /api/ns1/{'a' * 30_000}", "X-Token: TOKEN"), {400}),
    "huge headers": (request(f"PUT {Q}", "X-Token: TOKEN", f"X-Other: {'a' * 300_000}"), {400, 431}),
    "many headers": (request(f"PUT {Q}", *[f"X-{n}: a" for n in range(20_000)]), {400, 401, 431}),
    "a header without a colon": (request(f"PUT {Q}", "X-Token"), {400}),
    "the token twice": (request(f"PUT {Q}", "X-Token: TOKEN", "X-Token: TOKEN"), {401}),
    "a negative length": (request(f"PUT {Q}", "X-Token: TOKEN", "Content-Length: -1"), {400}),
    "a length in words": (request(f"PUT {Q}", "X-Token: TOKEN", "Content-Length: many"), {400}),
    "a length of many digits": (request(f"PUT {Q}", "X-Token: TOKEN", f"Content-Length: {'9' * 40}"), {400, 413}),
    "two lengths": (request(f"PUT {Q}", "X-Token: TOKEN", "Content-Length: 1", "Content-Length: 2", body="xx"), {400}),
    "a length and chunks": (
        request(f"PUT {Q}", "X-Token: TOKEN", "Content-Length: 9", "Transfer-Encoding: chunked", body="x\r\n"),
        {400},
    ),
    "a bad chunk": (request(f"PUT {Q}", "X-Token: TOKEN", "Transfer-Encoding: chunked", body="zz\r\nx\r\n"), {400}),
    "a huge chunk": (
        request(f"PUT {Q}", "X-Token: TOKEN", "Transfer-Encoding: chunked", body="f" * 40 + "\r\n"),
        {400},
    ),
    "another encoding": (request(f"PUT {Q}", "X-Token: TOKEN", "Transfer-Encoding: gzip"), {400, 501}),
    "a method with a sign": (request(f"P@T {Q}", "X-Token: TOKEN"), {400, 404}),
    "a method in a header": (request(f"POST {Q}", "X-Token: TOKEN", "X-HTTP-Method-Override: PUT"), {404}),
    "many parameters": (request(f"PUT {Q}?{'a&' * 5_000}delay=x", "X-Token: TOKEN"), {400}),
    "a number of many digits": (request(f"PUT {Q}?delay={'9' * 5000}", "X-Token: TOKEN"), {400}),
    "digits of another script": (request(f"PUT {Q}?delay=%D9%A1", "X-Token: TOKEN"), {400}),
    "a job of many letters": (request(f"DELETE {Q}/job/{'Z' * 5000}", "X-Token: TOKEN"), {204}),
    "the greatest job": (request(f"GET {Q}/job/{'Z' * 26}", "X-Token: TOKEN"), {404}),
    "too much, after a question": (
        request(f"PUT {Q}", "X-Token: TOKEN", "Expect: 100-continue", "Content-Length: 1048577"),
        {413},
    ),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
}


def test_no_trick_is_an_error_of_the_server(server: Server) -> None:
    statuses = {}
    for name, (text, right) in TRICKS.items():
        with (
            contextlib.suppress(ConnectionError),
            server.send_raw(text.replace(b"TOKEN", server.token.encode())) as opened,
        ):
            statuses[name] = right, answered(opened)
        assert server.ask("GET", "/version")[0] == 200, name
    found = {name: (right, re.match(rb"HTTP/1.1 (\d+) ", told)) for name, (right, told) in statuses.items()}
    wrong = {name: told for name, (right, told) in found.items() if told is None or int(told[1]) not in right}
    assert wrong == {}
    assert "Traceback" not in server.log
    assert not Message.objects.exists()


def test_slow_clients_hold_up_nobody(server: Server) -> None:
    head = f"PUT {Q} HTTP/1.1\r\nHost: x\r\nX-Token: {server.token}\r\nContent-Length: 9\r\n\r\nhal"
    with contextlib.ExitStack() as opened:
        for end in range(1, len(head), 2):
            opened.enter_context(server.send_raw(head[:end].encode()))
        assert server.ask("PUT", Q, b"x")[0] == 201
    assert server.ask("GET", Q)[0] == 200
    assert Message.objects.count() == 1


def test_a_body_that_takes_too_long_is_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYQ_TEST_BODY_TIMEOUT", "0.2")
    with Server(token=wire.token, module=PROJECT) as server:
        for text in ("Content-Length: 9\r\n\r\nhal", "Transfer-Encoding: chunked\r\n\r\n" + "f" * 10):
            head = f"PUT {Q} HTTP/1.1\r\nHost: x\r\nX-Token: {wire.token}\r\n{text}"
            with server.send_raw(head.encode()) as opened:
                answer = answered(opened)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b'{"error":"failed to read body"}' in answer
        assert server.ask("PUT", Q, b"whole")[0] == 201
    assert Message.objects.count() == 1


def test_chunks_under_wsgi_are_refused(wire: Wire) -> None:
    """There Django sees no body where its length is not told: nothing would be published in its place."""
    told = wire.client.generic(
        "PUT", Q, headers={"X-Token": wire.token, "Transfer-Encoding": "chunked"}, CONTENT_LENGTH=""
    )
    assert (told.status_code, told.json()) == (400, {"error": "failed to read body"})
    assert not Message.objects.exists()
