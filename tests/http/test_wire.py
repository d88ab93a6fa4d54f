"""What the HTTP door does beyond the answers that were recorded, for which see ``test_answers``."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_delayq import handler, middleware, schedule_message
from django_delayq.core import once
from django_delayq.http import jobs, tokens, views
from django_delayq.http.models import Token
from django_delayq.models import Message
from django_delayq.project import registry
from django_delayq.pull import take
from django_delayq.signals import message_succeeded
from tests.http.conftest import Wire
from tests.support.broken_statements import broken
from tests.support.commands import run
from tests.support.middlewares import installed
from tests.support.receivers import heard
from tests.support.rows import unguarded
from tests.support.statements import count_statements
from tests.support.steps import ago, somebody_waits
from tests.support.transactions import unfinished, waits_for_a_lock
from tests.support.workers import eventually

NONE = (404, {"msg": "no job available"})
LONG = "a" * 255
MEBIBYTE = 1_048_576


def error(status: int, text: str) -> tuple[int, dict[str, str]]:
    return status, {"error": text}


def publish(wire: Wire, queue: str = "q1", body: bytes = b"hello", query: str = "", **headers: str) -> str:
    status, content = wire("PUT", f"/api/ns1/{queue}?{query}", body, **headers)
    assert (status, content["msg"]) == (201, "published")
    return str(content["job_id"])


def consume(wire: Wire, queue: str = "q1", query: str = "") -> Any:
    status, content = wire("GET", f"/api/ns1/{queue}?{query}")
    assert status == 200, content
    return content


def data(job: dict[str, Any]) -> bytes:
    return base64.b64decode(job["data"])


@pytest.mark.parametrize("path", ["size", "deadletter", "deadletter/size"])
def test_the_count_for_a_size_is_bounded(wire: Wire, path: str) -> None:
    publish(wire)
    with CaptureQueriesContext(connections["default"]) as captured:
        wire("GET", f"/api/ns1/q1/{path}")
    (counts,) = [query["sql"] for query in captured if "COUNT(" in query["sql"]]
    assert "LIMIT 100000" in counts


def test_an_acknowledgement_is_told_as_that_of_a_program(wire: Wire) -> None:
    job = publish(wire)
    consume(wire)
    with heard(message_succeeded) as told:
        assert wire("DELETE", f"/api/ns1/q1/job/{job}") == (204, None)
    assert [(each["message_id"], each["delivery"]) for each in told] == [(jobs.message_id(job), 1)]


def test_a_token_may_name_the_default_pool(wire: Wire) -> None:
    assert wire("GET", "/api/ns1/qe", X_Token=f"default:{wire.token}") == NONE


def test_a_queue_with_a_long_name(wire: Wire) -> None:
    publish(wire, LONG)
    assert consume(wire, LONG)["queue"] == LONG


def test_no_ttl_is_for_ever(wire: Wire) -> None:
    publish(wire, query="ttl=0")
    assert consume(wire)["ttl"] == 0
    publish(wire, query="ttl=0&delay=10")
    assert wire("GET", "/api/ns1/q1") == NONE


def test_a_body_of_a_mebibyte_comes_back_exact(wire: Wire) -> None:
    body = bytes(range(256)) * 4096
    publish(wire, body=body)
    assert data(consume(wire)) == body


def test_a_count_of_one_gives_an_object(wire: Wire) -> None:
    # Some clients always send it.
    publish(wire)
    assert data(consume(wire, query="count=1")) == b"hello"


def test_several_queues_go_by_their_order(wire: Wire) -> None:
    publish(wire, "last", b"b")
    publish(wire, "first", b"a")
    assert consume(wire, "first,last")["queue"] == "first"
    assert consume(wire, "first,last")["queue"] == "last"


def test_republish_puts_a_job_in_the_place_of_another(wire: Wire) -> None:
    old = publish(wire)
    assert wire("PUT", f"/api/ns1/q1/job/{old}?delay=x", b"new") == error(400, "invalid delay")
    status, content = wire("PUT", f"/api/ns1/q1/job/{old}", b"new")
    assert (status, content["msg"]) == (201, "published")
    assert content["job_id"] != old
    assert wire("GET", f"/api/ns1/q1/job/{old}") == error(404, "job not found")
    assert data(consume(wire)) == b"new"


@pytest.mark.parametrize(("body", "answer"), [
    (b"[1,]", "request body should be an array of objects"),
    (b"[1] x", "request body should be an array of objects"),
    (b"[" * 5000, "request body should be an array of objects"),
    (b" [ ] ", "no jobs"),
])  # fmt: skip
def test_impossible_bulks(wire: Wire, body: bytes, answer: str) -> None:
    assert wire("PUT", "/api/ns1/q1/bulk", body) == error(400, answer)


def test_attributes_need_the_version_of_jobs_and_are_few(wire: Wire) -> None:
    publish(wire, body=b"v1", Job_Attr_Hello="world")
    assert consume(wire)["attributes"] is None
    many = {f"Job_Attr_{number}": "x" for number in range(17)}
    assert wire("PUT", "/api/ns1/q1", b"", Enable_Job_Version="YES", **many) == error(
        400, "too many attributes, cannot exceed 16"
    )


def test_signs_of_html_are_escaped_as_go_does(wire: Wire) -> None:
    publish(wire, "qhtml", b"x", Enable_Job_Version="YES", Job_Attr_X="<&>")
    assert consume(wire, "qhtml")["attributes"] == {"x": "<&>"}
    assert rb'{"x":"\u003c\u0026\u003e"}' in wire.last.content


def test_dead_letters_are_deleted_from_the_oldest_on(wire: Wire) -> None:
    ids = [publish(wire, "qbatch", body) for body in (b"m1", b"m2", b"m3")]
    consume(wire, "qbatch", "count=3&ttr=0")
    eventually(lambda: wire("GET", "/api/ns1/qbatch/deadletter/size")[1]["size"] == 3)
    assert wire("DELETE", "/api/ns1/qbatch/deadletter") == (204, None)
    assert wire("GET", "/api/ns1/qbatch/deadletter")[1]["deadletter_head"] == ids[1]
    assert wire("DELETE", "/api/ns1/qbatch/deadletter?limit=10") == (204, None)
    assert wire("GET", "/api/ns1/qbatch/deadletter")[1]["deadletter_size"] == 0


def test_destroy_leaves_what_is_not_due(wire: Wire) -> None:
    publish(wire)
    later = publish(wire, query="delay=60")
    assert wire("DELETE", "/api/ns1/q1") == (204, None)
    assert wire("GET", "/api/ns1/q1") == NONE
    assert wire("GET", f"/api/ns1/q1/job/{later}")[0] == 200


def test_a_delay_of_a_century_is_taken(wire: Wire) -> None:
    publish(wire, query="delay=3155760000&ttl=0")


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"b": 1, "a": 2}', b"\xff\x00", b"NaN", b'{"base64": "eA=="}', b'"\\u0000"', b" 1 "),
        # Python reads both as JSON in UTF-16.
        *('{"a": 1}'.encode("utf-16"), b"1\x00"),
    ],
)
def test_a_body_comes_back_exact(wire: Wire, body: bytes) -> None:
    publish(wire, body=body)
    assert data(consume(wire)) == body


def test_large_json_comes_back_as_the_same_json(wire: Wire) -> None:
    value = {"rows": list(range(5000))}
    publish(wire, body=json.dumps(value).encode())
    assert json.loads(data(consume(wire))) == value


def test_what_go_publishes_a_django_program_takes_and_the_other_way_round(wire: Wire) -> None:
    publish(wire, body=b'{"order": 7}')
    (found,) = take("ns1.q1")
    assert (found.topic, found.payload) == ("ns1.q1", {"order": 7})
    schedule_message("orders", {"order": 8}, queue="ns1.q1")
    assert data(consume(wire)) == b'{"order":8}'


def test_a_handler_receives_what_go_publishes(wire: Wire, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HTTP": {"TOPICS": {"ns1x.orders": "t.ok"}}}
    _token, text = tokens.make("ns1x")
    assert wire("PUT", "/api/ns1x/orders", b'{"order": 7}', X_Token=text)[0] == 201
    row = Message.objects.get()
    assert (row.topic, row.queue, row.payload) == ("t.ok", "ns1x.orders", {"order": 7})
    assert wire("GET", "/api/ns1x/orders", X_Token=text)[0] == 400
    assert wire("PUT", "/api/ns1x/others", b"", X_Token=text)[0] == 400


def test_a_body_that_does_not_fit_its_handler_is_refused(wire: Wire, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": None, "HTTP": {"TOPICS": {"ns1.orders": "typed.orders"}}}

    @handler("typed.orders", payload=(int, int))
    def close(message: Any) -> None:
        raise NotImplementedError

    try:
        assert wire("PUT", "/api/ns1/orders", b"7")[0] == 201
        status, content = wire("PUT", "/api/ns1/orders", b'"seven"')
        assert (status, "the payload does not fit int" in content["error"]) == (400, True)
        assert wire("PUT", "/api/ns1/orders/bulk", b'[7, "seven"]')[0] == 400
        assert wire("PUT", "/api/ns1/orders", b" " * MEBIBYTE)[0] == 400
    finally:
        registry.unregister("typed.orders")
    assert Message.objects.count() == 1


def test_a_body_without_what_the_limit_key_needs_is_refused(wire: Wire, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": None, "HTTP": {"TOPICS": {"ns1.orders": "limited.orders"}}}

    @handler("limited.orders", limit=1, limit_key=lambda message: message.payload["customer"])
    def close(message: Any) -> None:
        raise NotImplementedError

    large = json.dumps({"customer": "c2", "text": "x" * 300_000}).encode()
    try:
        assert wire("PUT", "/api/ns1/orders", b'{"customer": "c1"}')[0] == 201
        for body, word in ((b"{}", "limit_key"), (b"7", "limit_key"), (b"no json", "limit_key"), (large, "300")):
            status, content = wire("PUT", "/api/ns1/orders", body)
            assert (status, word in content["error"]) == (400, True), content
    finally:
        registry.unregister("limited.orders")
    assert Message.objects.get().limit_key == "c1"


def test_an_error_of_the_project_is_an_answer_and_counts_no_call(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(middleware.Middleware):
        def scheduling(self, drafts: Any) -> Any:
            raise RuntimeError("no tenant")

    tokens.limit(Token.objects.get(), None, 1, 3600)
    with installed(Broken()):
        for _time in range(2):
            assert wire("PUT", "/api/ns1/q1", b"x") == error(500, "internal error")
    assert "no tenant" in caplog.text
    assert wire("PUT", "/api/ns1/q1", b"x")[0] == 201


def test_no_cache_of_the_whole_site_gives_a_job_to_another(wire: Wire, settings: Any) -> None:
    cached = [f"django.middleware.cache.{name}Middleware" for name in ("UpdateCache", "FetchFromCache")]
    settings.MIDDLEWARE = [cached[0], *settings.MIDDLEWARE, cached[1]]
    made = {publish(wire), publish(wire)}
    assert {consume(wire)["job_id"], consume(wire)["job_id"]} == made
    assert wire("GET", "/api/ns1/q1", X_Token="") == error(401, "token not found")


def test_a_queue_whose_name_is_a_digest_is_no_other_one(wire: Wire, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "PULL_QUEUES": {"http.*": {}}}
    (_row, unusual), (_row, plain) = tokens.make("_shop"), tokens.make("http")
    assert wire("PUT", "/api/_shop/orders", b"mine", X_Token=unusual)[0] == 201
    digest = Message.objects.get().queue.removeprefix("http.")
    assert wire("GET", f"/api/http/{digest}", X_Token=plain) == NONE
    assert wire("PUT", f"/api/http/{digest}", b"theirs", X_Token=plain)[0] == 201
    for namespace, queue, text, body in (("http", digest, plain, b"theirs"), ("_shop", "orders", unusual, b"mine")):
        assert data(wire("GET", f"/api/{namespace}/{queue}", X_Token=text)[1]) == body


def test_a_request_names_a_bounded_number_of_queues(wire: Wire) -> None:
    names = [f"q{number}" for number in range(views.MOST_QUEUES)]
    assert wire("GET", f"/api/ns1/{','.join(names * 2)}") == NONE
    assert wire("GET", f"/api/ns1/{','.join([*names, 'q'])}") == error(400, "too many queues")


@pytest.mark.parametrize("kept", ["mine", {"bytes": True}, {"at": "noon"}, {"attributes": 7, "body": "7"}])
def test_headers_of_the_same_name_do_no_harm(wire: Wire, kept: Any) -> None:
    schedule_message("orders", 7, queue="ns1.q1", headers={"http": kept})
    assert wire("GET", "/api/ns1/q1/peek")[0] == 200
    assert data(consume(wire)) == b"7"


@pytest.mark.parametrize("headers", [[], "http", 7])
def test_headers_that_are_no_object_do_no_harm(wire: Wire, headers: Any) -> None:
    message = schedule_message("orders", 7, queue="ns1.q1")
    unguarded(Message).filter(pk=message.pk).update(headers=headers)
    assert wire("GET", "/api/ns1/q1/peek")[0] == 200
    assert data(consume(wire)) == b"7"


def test_a_job_whose_answer_fails_goes_back(wire: Wire) -> None:
    schedule_message("orders", 7, queue="ns1.q1", max_attempts=1)
    # When such a message was published, another statement finds.
    with broken('SELECT "delayq_message"."id", "delayq_message"."created_at"'):
        assert wire("GET", "/api/ns1/q1") == error(500, "internal error")
    assert data(consume(wire)) == b"7"


def test_rights_namespaces_and_ends_of_tokens(wire: Wire) -> None:
    _token, text = tokens.make("ns1", ["publish"])
    assert wire("PUT", "/api/ns1/q1", b"", X_Token=text)[0] == 201
    assert wire("GET", "/api/ns1/q1", X_Token=text) == error(403, "the token has no right to consume")
    assert wire("GET", "/api/ns2/q1") == error(401, "invalid token")
    row, old = tokens.make("ns1")
    row.expires_at = ago(5)
    row.save()
    assert wire("GET", "/api/ns1/q1", X_Token=old) == error(401, "invalid token")


@pytest.mark.parametrize(
    "path",
    [
        "ns1/%2e%2e",
        "ns1/q1%2Fjob%2Fx/y",
        "ns1//q1",
        "ns1/q1/job/",
        "ns1/q1/bulk/x",
        "%00/q1",
        "ns1/q1%0A",
        "ns1/q\u00e9",
    ],
)
def test_tricks_with_paths_are_refused(wire: Wire, path: str) -> None:
    assert wire("PUT", f"/api/{path}", b"x")[0] in (400, 404)
    assert not Message.objects.exists()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PATCH", "POST", "TRACE"])
def test_other_methods_are_not_there(wire: Wire, method: str) -> None:
    assert wire.client.generic(method, "/api/ns1/q1", headers={"X-Token": wire.token}).status_code == 404


@pytest.mark.parametrize("length", ["x", "-1", "1048577", "9" * 30])
def test_a_length_that_is_wrong_or_too_large_is_refused_unread(wire: Wire, length: str) -> None:
    unread = wire.client.generic("PUT", "/api/ns1/q1", headers={"X-Token": wire.token}, CONTENT_LENGTH=length)
    assert unread.status_code in (400, 413)
    assert not Message.objects.exists()


def test_a_late_acknowledgement_counts_and_one_of_another_queue_does_not(wire: Wire) -> None:
    job = publish(wire, query="tries=2")
    consume(wire, query="ttr=0")
    assert wire("DELETE", f"/api/ns1/q2/job/{job}") == (204, None)
    assert Message.objects.get().state != "consumed"
    assert wire("DELETE", f"/api/ns1/q1/job/{job}") == (204, None)
    assert Message.objects.get().state == "consumed"


@pytest.mark.postgresql
def test_an_acknowledgement_is_one_statement(wire: Wire) -> None:
    def acknowledged() -> int:
        job = publish(wire)
        consume(wire)
        return count_statements(lambda: wire("DELETE", f"/api/ns1/q1/job/{job}"))

    # Once a second the token is looked for, too.
    assert min(acknowledged() for _time in range(3)) == 1
    assert {message.state for message in Message.objects.all()} == {"consumed"}


@pytest.mark.postgresql
def test_a_job_that_is_claimed_while_it_is_deleted_ends(wire: Wire) -> None:
    def let_go() -> None:
        eventually(waits_for_a_lock)
        go.set()
        connections.close_all()

    job = publish(wire)
    with unfinished(lambda: take("ns1.q1")) as go:
        thread = threading.Thread(target=let_go)
        thread.start()
        assert wire("DELETE", f"/api/ns1/q1/job/{job}") == (204, None)
        thread.join()
    assert (Message.objects.get().state, Message.objects.get().deliveries) == ("consumed", 1)


def test_a_poll_waits(wire: Wire) -> None:
    def later() -> None:
        eventually(somebody_waits)
        schedule_message("x", 1, queue="ns1.q1")
        connections.close_all()

    publisher = threading.Thread(target=later)
    publisher.start()
    assert data(consume(wire, query="timeout=60&count=3")[0]) == b"1"
    publisher.join()


def test_job_ids_say_which_message_and_when(wire: Wire) -> None:
    assert jobs.message_id(publish(wire)) == Message.objects.get().pk
    assert jobs.message_id("x") is None


def test_the_version_and_the_queues(wire: Wire) -> None:
    assert wire("GET", "/version")[1].keys() == {"build_commit", "build_date", "version"}
    publish(wire)
    assert wire("GET", "/info?namespace=ns1") == (200, {"ns1": ["q1"]})
    assert wire("GET", "/info?namespace=ns1", X_Token="")[0] == 401


async def ask(path: str, token: str) -> tuple[int, Any]:
    """Send a GET to the project as an ASGI server does."""
    path, _mark, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query.encode(),
        "http_version": "1.1",
        "headers": [(b"x-token", token.encode()), (b"host", b"testserver")],
    }
    communicator: Any = ApplicationCommunicator(get_asgi_application(), scope)  # type: ignore[no-untyped-call]
    await communicator.send_input({"type": "http.request", "body": b""})
    start, body = await communicator.receive_output(60), await communicator.receive_output(60)
    # It closes its connection at the end.
    await communicator.wait(60)
    return start["status"], json.loads(body["body"])


def test_without_the_door_in_asgi_py_the_log_warns(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    once.logged.clear()
    assert [async_to_sync(ask)("/api/ns1/q1", wire.token) for _ in range(2)] == [NONE, NONE]
    assert [record.message for record in caplog.records if "hold threads" in record.message] == [
        "Polls by HTTP hold threads: wrap the application of asgi.py in django_delayq.http.asgi.Door"
    ]


NODE = """
const [base, token] = process.argv.slice(2)
const headers = {"X-Token": token}
const ask = async (method, path, body) => {
  const answer = await fetch(base + path, {method, headers, body})
  const text = await answer.text()
  return [answer.status, text && JSON.parse(text)]
}
const [published, {job_id}] = await ask("PUT", "/api/ns1/q1?tries=2", "from node")
const [taken, job] = await ask("GET", "/api/ns1/q1?timeout=10&ttr=30")
const [gone] = await ask("DELETE", `/api/ns1/q1/job/${job_id}`)
const [none] = await ask("GET", "/api/ns1/q1?timeout=1")
console.log(JSON.stringify([published, taken, job.job_id === job_id, atob(job.data), gone, none]))
"""


def test_node_publishes_polls_and_acknowledges_by_plain_fetch(wire: Wire, live_server: Any, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    (tmp_path / "client.mjs").write_text(NODE)
    command = [node, str(tmp_path / "client.mjs"), live_server.url, wire.token]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [201, 200, True, "from node", 204, 404]


def test_no_token_begins_as_an_option_of_a_command_does(wire: Wire) -> None:
    assert all(tokens.make("ns1")[1].isalnum() for _number in range(40))


@pytest.mark.console
def test_a_token_changes_with_its_audit_or_not_at_all(wire: Wire) -> None:
    before = list(Token.objects.values())
    args = ("ns1", "--beginning", wire.token[:8])
    with broken('INSERT INTO "delayq_audit'):
        for words in (("add", "ns1"), ("limit", *args, "--reads", "1"), ("delete", *args)):
            assert run("delayq_token", *words).code == 69
    assert list(Token.objects.values()) == before


def test_tokens_by_the_command(wire: Wire) -> None:
    text = run("delayq_token", "add", "ns1", "--rights", "consume", "--lasts", "90d", "--description", "Go").out.strip()
    assert wire("GET", "/api/ns1/q1", X_Token=text) == NONE
    assert text not in str(Token.objects.filter(beginning=text[:8]).values().get())
    listed = run("delayq_token", "list", "ns1").out
    assert f"{text[:8]}… of ns1: consume, until " in listed
    assert text not in listed
    assert run("delayq_token", "add", "ns1", "--rights", "all").code == 2
    for no_namespace in ("", "shop.eu", "a b", "é"):
        assert run("delayq_token", "add", no_namespace).code == 2
    for no_text in ("a" * 256, "\udcff"):
        assert run("delayq_token", "delete", no_text, "--beginning", "a").code == 1
        assert run("delayq_token", "delete", "ns1", "--beginning", no_text).code == 1
    for wrong in ("x" * 201, "\udcff"):
        assert run("delayq_token", "add", "ns1", "--description", wrong).code == 1
    assert run("delayq_token", "add", "ns1", "--database", "other").code == 2
    assert run("delayq_token", "delete", "ns1").code == 2
    assert run("delayq_token", "delete", "ns1", "--beginning", text[:8]).code == 0
    assert wire("GET", "/api/ns1/q1", X_Token=text) == error(401, "invalid token")
