"""The answers that were recorded from a server of lmstfy. Each that differs says why."""

from __future__ import annotations

import asyncio
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

from django_delayq import aschedule_message, schedule_message
from django_delayq.http import jobs, tokens
from django_delayq.http.models import Token
from django_delayq.models import Message
from django_delayq.pull import take
from django_delayq.signals import message_succeeded
from tests.http.conftest import Wire
from tests.support.claims import DB
from tests.support.commands import run
from tests.support.receivers import heard
from tests.support.rows import unguarded
from tests.support.steps import ago, somebody_waits
from tests.support.workers import eventually

NONE = (404, {"msg": "no job available"})
UNKNOWN = (404, {"error": "api not found"})
LONG = "a" * 255
EMPTY = {"queue": "q1", "size": 0}


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


# --- the same as recorded: what needs no job --------------------------------------------------------------------------

SAME = [
    ("no token", "GET", "/api/ns1/q1", error(401, "token not found"), {"X_Token": ""}),
    ("bad token", "GET", "/api/ns1/q1", error(401, "invalid token"), {"X_Token": "01M7XWXEY84J7ZHDDF71CSKH32"}),
    ("bad pool token", "GET", "/api/ns1/q1", error(404, "pool not found"), {"X_Token": "nopool:01M7XWXEY84J7ZHDDF71"}),
    ("404 route", "GET", "/api/ns1", UNKNOWN, {}),
    ("404 method POST", "POST", "/api/ns1/q1", UNKNOWN, {}),
    ("trailing slash GET", "GET", "/api/ns1/q1/", UNKNOWN, {}),
    ("trailing slash PUT", "PUT", "/api/ns1/q1/", UNKNOWN, {}),
    ("bad ns", "PUT", "/api/n.s/q1", error(400, "namespace name contains forbidden characters"), {}),
    ("bad queue PUT", "PUT", "/api/ns1/q:1", error(400, "queue name contains forbidden characters"), {}),
    ("underscore queue PUT", "PUT", "/api/ns1/_q", error(400, "queue name contains forbidden characters"), {}),
    ("underscore queue GET", "GET", "/api/ns1/_q", NONE, {}),
    ("long queue PUT", "PUT", f"/api/ns1/{LONG}a", error(400, "namespace or queue name too long"), {}),
    ("publish ttl<delay", "PUT", "/api/ns1/q1?delay=10&ttl=5", error(400, "ttl is shorter than delay"), {}),
    ("publish bad delay", "PUT", "/api/ns1/q1?delay=x", error(400, "invalid delay"), {}),
    ("publish empty delay", "PUT", "/api/ns1/q1?delay=", error(400, "invalid delay"), {}),
    ("publish float delay", "PUT", "/api/ns1/q1?delay=1.5", error(400, "invalid delay"), {}),
    ("publish over max delay", "PUT", "/api/ns1/q1?delay=4294967296", error(400, "invalid delay"), {}),
    ("publish bad ttl", "PUT", "/api/ns1/q1?ttl=-1", error(400, "invalid ttl"), {}),
    ("publish bad tries", "PUT", "/api/ns1/q1?tries=65536", error(400, "invalid tries"), {}),
    ("publish tries 0", "PUT", "/api/ns1/q1?tries=0", error(400, "tries shouldn't be zero"), {}),
    (
        "size no token other ns",
        "GET",
        "/api/anyns/q1/size",
        (200, {"namespace": "anyns", "queue": "q1", "size": 0}),
        {},
    ),
    ("peek empty", "GET", "/api/ns1/qe/peek", error(404, "the queue is empty"), {}),
    ("peek queue no token", "GET", "/api/ns1/q1/peek", error(401, "token not found"), {"X_Token": ""}),
    ("consume none", "GET", "/api/ns1/qe", NONE, {}),
    ("consume bad ttr", "GET", "/api/ns1/q1?ttr=x", error(400, "invalid ttr"), {}),
    ("consume bad timeout", "GET", "/api/ns1/q1?timeout=x", error(400, "invalid timeout"), {}),
    ("consume count 0", "GET", "/api/ns1/q1?count=0", error(400, "invalid count"), {}),
    ("consume count 101", "GET", "/api/ns1/q1?count=101", error(400, "invalid count"), {}),
    ("consume count x", "GET", "/api/ns1/q1?count=x", error(400, "invalid count"), {}),
    ("consume ,", "GET", "/api/ns1/,", error(400, "invalid queue name(s)"), {}),
    ("consume multi", "GET", "/api/ns1/qe,qf", NONE, {}),
    ("batch consume none", "GET", "/api/ns1/qe?count=2", NONE, {}),
    ("peek job unknown", "GET", "/api/ns1/q1/job/01M7XWXFHD51X03GYZGR000000", error(404, "job not found"), {}),
    ("delete job again", "DELETE", "/api/ns1/q1/job/01M7XWXFHD51X03GYZGR000000", (204, None), {}),
    (
        "deadletter size",
        "GET",
        "/api/ns1/qn/deadletter/size",
        (200, {"namespace": "ns1", "queue": "qn", "size": 0}),
        {},
    ),
    ("deadletter respawn bad limit", "PUT", "/api/ns1/qn/deadletter?limit=0", error(400, "invalid limit"), {}),
    ("deadletter respawn bad ttl", "PUT", "/api/ns1/qn/deadletter?ttl=x", error(400, "invalid ttl"), {}),
    ("deadletter delete 10", "DELETE", "/api/ns1/qn/deadletter?limit=10", (204, None), {}),
    ("deadletter delete bad", "DELETE", "/api/ns1/qn/deadletter?limit=x", error(400, "invalid limit"), {}),
    ("deadletter respawn none", "PUT", "/api/ns1/qn/deadletter", (200, {"count": 0, "msg": "respawned"}), {}),
    ("destroy unknown", "DELETE", "/api/ns1/qn", (204, None), {}),
]


@pytest.mark.parametrize(("name", "method", "path", "answer", "headers"), SAME, ids=[row[0] for row in SAME])
def test_an_answer_that_needs_no_job_is_the_same(
    wire: Wire, name: str, method: str, path: str, answer: tuple[int, Any], headers: dict[str, str]
) -> None:
    assert wire(method, path, b"", **headers) == answer
    assert len(wire.last["X-Request-Id"]) == 26
    assert wire.last.get("Content-Type") == (None if answer[0] == 204 else "application/json; charset=utf-8")


def test_the_dead_letters_of_an_unknown_queue_are_the_same(wire: Wire) -> None:
    none = {"deadletter_head": "", "deadletter_size": 0, "namespace": "ns1", "queue": "qnone"}
    assert wire("GET", "/api/ns1/qnone/deadletter") == (200, none)


# --- the same as recorded: jobs ---------------------------------------------------------------------------------------


def test_a_job_goes_through(wire: Wire) -> None:
    job = publish(wire, query="tries=3&ttl=100")
    assert wire("GET", "/api/ns1/q1/size", X_Token="") == (200, {"namespace": "ns1", "queue": "q1", "size": 1})
    named = {"attributes": None, "data": "aGVsbG8=", "job_id": job, "namespace": "ns1", "queue": "q1"}
    status, seen = wire("GET", "/api/ns1/q1/peek")
    assert seen.pop("elapsed_ms") >= 0
    assert (status, seen) == (200, {**named, "remain_tries": 3, "ttl": 100})
    status, seen = wire("GET", f"/api/ns1/q1/job/{job}")
    assert seen.pop("elapsed_ms") >= 0
    assert (status, seen) == (200, {**named, "remain_tries": 0, "ttl": 100})
    taken = consume(wire, query="ttr=30")
    assert wire.last.content.startswith(b'{"attributes":null,"data":"aGVsbG8=","elapsed_ms":')
    assert taken.pop("elapsed_ms") >= 0
    assert taken == {**named, "msg": "new job", "remain_tries": 2, "ttl": 100}
    assert wire("DELETE", f"/api/ns1/q1/job/{job}") == (204, None)
    assert Message.objects.get().state == "consumed"


def test_an_acknowledgement_is_told_as_that_of_a_program(wire: Wire) -> None:
    job = publish(wire)
    consume(wire)
    with heard(message_succeeded) as told:
        assert wire("DELETE", f"/api/ns1/q1/job/{job}") == (204, None)
    assert [(each["message_id"], each["delivery"]) for each in told] == [(jobs.message_id(job), 1)]


def test_a_job_with_the_defaults_and_an_empty_body(wire: Wire) -> None:
    publish(wire, "q2", b"")
    taken = consume(wire, "q2")
    assert (taken["data"], taken["remain_tries"], taken["ttl"]) == ("", 0, 86400)


def test_a_token_may_stand_in_the_query_and_name_the_default_pool(wire: Wire) -> None:
    assert wire("GET", f"/api/ns1/qe?token={wire.token}", X_Token="") == NONE
    assert wire("GET", "/api/ns1/qe", X_Token=f"default:{wire.token}") == NONE


def test_a_queue_with_a_long_name(wire: Wire) -> None:
    publish(wire, LONG)
    assert consume(wire, LONG)["queue"] == LONG


def test_no_ttl_is_for_ever(wire: Wire) -> None:
    publish(wire, query="ttl=0")
    assert consume(wire)["ttl"] == 0
    publish(wire, query="ttl=0&delay=10")
    assert wire("GET", "/api/ns1/q1") == NONE


def test_a_body_of_a_mebibyte_is_taken_and_one_byte_more_is_not(wire: Wire) -> None:
    body = bytes(range(256)) * 4096
    publish(wire, body=body)
    assert data(consume(wire)) == body
    assert wire("PUT", "/api/ns1/q1", body + b"x") == error(413, "body too large")


def test_batches(wire: Wire) -> None:
    for body in (b"m1", b"m2", b"m3"):
        publish(wire, "qbatch", body)
    assert [data(job) for job in consume(wire, "qbatch", "count=2")] == [b"m1", b"m2"]
    assert [data(job) for job in consume(wire, "qbatch", "count=2")] == [b"m3"]
    publish(wire, "qbatch", b"m4")
    # Some clients always send it, and want an object.
    assert data(consume(wire, "qbatch", "count=1")) == b"m4"


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


BULK = b'["hello msg",123456,{"msg": "ok"},["a" ],true,null]'


def test_bulk(wire: Wire) -> None:
    assert data({"data": base64.b64encode(BULK)}) == BULK
    publish(wire, "qbulk", BULK, "ttl=10")
    assert data(consume(wire, "qbulk")) == BULK
    status, content = wire("PUT", "/api/ns1/qbulk2/bulk", BULK)
    assert (status, len(content["job_ids"]), content["msg"]) == (201, 6, "published")
    found = consume(wire, "qbulk2", "count=10")
    assert [data(job) for job in found] == [b'"hello msg"', b"123456", b'{"msg": "ok"}', b'["a" ]', b"true", b"null"]
    assert [job["job_id"] for job in found] == content["job_ids"]


@pytest.mark.parametrize(("body", "answer"), [
    (b"{}", "request body should be an array of objects"),
    (b"[1,]", "request body should be an array of objects"),
    (b"[1] x", "request body should be an array of objects"),
    (b"[" * 5000, "request body should be an array of objects"),
    (b"[]", "no jobs"),
    (b" [ ] ", "no jobs"),
    (json.dumps([1] * 65).encode(), "too many jobs"),
])  # fmt: skip
def test_impossible_bulks(wire: Wire, body: bytes, answer: str) -> None:
    assert wire("PUT", "/api/ns1/q1/bulk", body) == error(400, answer)


def test_attributes(wire: Wire) -> None:
    given = {"Enable_Job_Version": "yes", "Job_Attr_Hello": "world", "Job_Attr_Foo_Bar": "Baz"}
    job = publish(wire, "qattr", b"v1", "ttl=100", **given)
    assert (len(job), job[0]) == (27, "1")
    taken = consume(wire, "qattr")
    assert (taken["attributes"], taken["job_id"]) == ({"foo-bar": "Baz", "hello": "world"}, job)
    assert len(publish(wire, "qattr", b"v1", Enable_Job_Version="YES")) == 27
    assert consume(wire, "qattr")["attributes"] is None
    publish(wire, "qattr", b"v1", Job_Attr_Hello="world")
    assert consume(wire, "qattr")["attributes"] is None
    many = {f"Job_Attr_{number}": "x" for number in range(17)}
    assert wire("PUT", "/api/ns1/q1", b"", Enable_Job_Version="YES", **many) == error(
        400, "too many attributes, cannot exceed 16"
    )


def test_signs_of_html_are_escaped_as_go_does(wire: Wire) -> None:
    publish(wire, "qhtml", b"x", Enable_Job_Version="YES", Job_Attr_X="<&>")
    assert consume(wire, "qhtml")["attributes"] == {"x": "<&>"}
    assert rb'{"x":"\u003c\u0026\u003e"}' in wire.last.content


def test_dead_letters(wire: Wire) -> None:
    ids = [publish(wire, "qbatch", body) for body in (b"m1", b"m2", b"m3")]
    consume(wire, "qbatch", "count=3&ttr=0")
    size = {"namespace": "ns1", "queue": "qbatch", "size": 3}
    eventually(lambda: wire("GET", "/api/ns1/qbatch/deadletter/size", X_Token="") == (200, size))
    head = {"deadletter_head": ids[0], "deadletter_size": 3, "namespace": "ns1", "queue": "qbatch"}
    assert wire("GET", "/api/ns1/qbatch/deadletter") == (200, head)
    assert wire("PUT", "/api/ns1/qbatch/deadletter") == (200, {"count": 1, "msg": "respawned"})
    taken = consume(wire, "qbatch")
    assert (data(taken), taken["job_id"], taken["remain_tries"], taken["ttl"]) == (b"m1", ids[0], 0, 86400)
    assert wire("DELETE", "/api/ns1/qbatch/deadletter") == (204, None)
    assert wire("GET", "/api/ns1/qbatch/deadletter")[1]["deadletter_size"] == 1


def test_destroy_leaves_what_is_not_due(wire: Wire) -> None:
    publish(wire)
    later = publish(wire, query="delay=60")
    assert wire("DELETE", "/api/ns1/q1") == (204, None)
    assert wire("GET", "/api/ns1/q1") == NONE
    assert wire("GET", f"/api/ns1/q1/job/{later}")[0] == 200


# --- what differs, because … ------------------------------------------------------------------------------------------


def test_publish_max_delay_differs_because_136_years_are_too_far(wire: Wire) -> None:
    assert wire("PUT", "/api/ns1/q1?delay=4294967295&ttl=0") == error(400, "invalid delay")
    publish(wire, query="delay=3155760000&ttl=0")


def test_after_an_ack_nothing_dangles_so_peek_and_size_differ(wire: Wire) -> None:
    job = publish(wire, "qj")
    assert wire("DELETE", f"/api/ns1/qj/job/{job}") == (204, None)
    # Recorded: 200 with "data": null, and a size of 1.
    assert wire("GET", "/api/ns1/qj/peek") == error(404, "the queue is empty")
    assert wire("GET", "/api/ns1/qj/size")[1]["size"] == 0


def test_an_expired_job_eats_no_call_so_peek_and_two_consumes_differ(wire: Wire) -> None:
    publish(wire, "qexp", b"dead", "ttl=1")
    publish(wire, "qexp", b"live", "ttl=100")
    unguarded(Message).filter(expires_at__isnull=False).order_by("id").filter(
        pk=Message.objects.order_by("id").values("pk")[:1]
    ).update(due_at=ago(9), expires_at=ago(5))
    # Recorded: a peek without data, then no job, and the live one by a second call.
    assert data(wire("GET", "/api/ns1/qexp/peek")[1]) == b"live"
    assert data(consume(wire, "qexp")) == b"live"
    assert wire("GET", "/api/ns1/qexp") == NONE


# --- beyond what was recorded -----------------------------------------------------------------------------------------


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


def test_polls_under_asgi_wait_together(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Django asks of a project under ASGI.
    monkeypatch.setitem(connections.settings[DB], "CONN_MAX_AGE", 0)

    async def poll() -> list[tuple[int, Any]]:
        polls = [asyncio.create_task(ask("/api/ns1/q1?timeout=60", wire.token)) for _ in range(3)]
        while not somebody_waits():
            await asyncio.sleep(0.01)
        for number in range(3):
            await aschedule_message("x", number, queue="ns1.q1")
        return await asyncio.gather(*polls)

    answers = async_to_sync(poll)()
    assert [status for status, _job in answers] == [200] * 3
    assert sorted(data(job) for _status, job in answers) == [b"0", b"1", b"2"]


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


def test_tokens_by_the_command(wire: Wire) -> None:
    text = run("delayq_token", "add", "ns1", "--rights", "consume", "--lasts", "90d", "--description", "Go").out.strip()
    assert wire("GET", "/api/ns1/q1", X_Token=text) == NONE
    assert text not in str(Token.objects.filter(beginning=text[:8]).values().get())
    listed = run("delayq_token", "list", "ns1").out
    assert f"{text[:8]}… of ns1: consume, until " in listed
    assert text not in listed
    assert run("delayq_token", "add", "ns1", "--rights", "all").code == 2
    assert run("delayq_token", "delete", "ns1").code == 2
    assert run("delayq_token", "delete", "ns1", "--beginning", text[:8]).code == 0
    assert wire("GET", "/api/ns1/q1", X_Token=text) == error(401, "invalid token")
