"""The 129 answers that were recorded from a server of lmstfy, and what the door answers: the same, or why not.

In a request and in an answer ``<id of NAME>`` stands for the job that the row NAME has published; in an answer ``<id>``
stands for the id of a job, ``<id+>`` for one with attributes, ``<n>`` for a number, and ``<ttl 100>`` for up to
that time.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from django_delayq.http import tokens
from django_delayq.http.models import Token
from django_delayq.models import Message
from tests.support.rows import unguarded
from tests.support.steps import ago
from tests.support.workers import eventually

JSON = "application/json; charset=utf-8"
# What happens before a request: the request of another row, or a step that is given the client.
Step = str | Callable[[Any], object]


class Told(NamedTuple):
    """An answer: its status and its body."""

    status: int
    body: str = ""


class Row(NamedTuple):
    """A request, what lmstfy answers, and what the door answers. ``because`` is empty when they are the same."""

    name: str
    method: str
    path: str
    recorded: Told
    ours: Told
    because: str = ""
    sent: bytes = b""
    headers: dict[str, str] = {}
    after: tuple[Step, ...] = ()


def same(name: str, request: str, status: int, body: str = "", **rest: Any) -> Row:
    """Return a row that the door answers as lmstfy does."""
    return differs(name, "", request, told := Told(status, body), told, **rest)


def differs(name: str, because: str, request: str, recorded: Told, ours: Told, **rest: Any) -> Row:
    """Return a row that the door answers in its own way."""
    method, path = request.split(" ", 1)
    return Row(name, method, path, recorded, ours, because, **rest)


def error(status: int, text: str) -> Told:
    return Told(status, json.dumps({"error": text}, separators=(",", ":")))


def fails(name: str, request: str, status: int, text: str, **rest: Any) -> Row:
    return same(name, request, *error(status, text), **rest)


def published(name: str, path: str, body: bytes = b"hello", *, job: str = "<id>", **rest: Any) -> Row:
    return same(name, f"PUT {path}", 201, f'{{"job_id":"{job}","msg":"published"}}', sent=body, **rest)


def job(queue: str, of: str, data: bytes, *, tries: int, ttl: int, attributes: str = "null", msg: str = "") -> str:
    """Return a job in an answer."""
    return (
        f'{{"attributes":{attributes},"data":"{base64.b64encode(data).decode()}","elapsed_ms":<n>,"job_id":"{of}",{msg}'
        f'"namespace":"ns1","queue":"{queue}","remain_tries":{tries},"ttl":{f"<ttl {ttl}>" if ttl else 0}}}'
    )


def taken(queue: str, of: str, data: bytes, *, tries: int = 0, ttl: int = 86_400, attributes: str = "null") -> str:
    """Return a job in an answer to consume."""
    return job(queue, of, data, tries=tries, ttl=ttl, attributes=attributes, msg='"msg":"new job",')


def sized(queue: str, size: int, namespace: str = "ns1") -> str:
    return f'{{"namespace":"{namespace}","queue":"{queue}","size":{size}}}'


def dead(queue: str, size: int, head: str = "") -> str:
    return f'{{"deadletter_head":"{head}","deadletter_size":{size},"namespace":"ns1","queue":"{queue}"}}'


# --- steps ------------------------------------------------------------------------------------------------------------


def first_has_expired(wire: Any) -> None:
    """Move the first message to where its time has run out."""
    first = Message.objects.order_by("id").values("pk")[:1]
    unguarded(Message).filter(pk__in=first).update(due_at=ago(9), expires_at=ago(5))


def three_are_dead(wire: Any) -> None:
    """Publish three jobs and lose them at once."""
    for body in (b"m1", b"m2", b"m3"):
        wire.row(ROWS[f"dead {body.decode()}"])
    wire("GET", "/api/ns1/qbatch?count=3&ttr=0")
    eventually(lambda: '"size":3' in wire.text("GET", "/api/ns1/qbatch/deadletter/size"))


def two_are_dead(wire: Any) -> None:
    """Lose three jobs, and respawn and acknowledge the first."""
    three_are_dead(wire)
    wire("PUT", "/api/ns1/qbatch/deadletter")
    wire("GET", "/api/ns1/qbatch")


def one_of_each(wire: Any) -> None:
    """Limit the token to one write and one read."""
    tokens.limit(Token.objects.get(), 1, 1, 3600)


# --- the rows ---------------------------------------------------------------------------------------------------------

NO_JOB = Told(404, '{"msg":"no job available"}')
UNKNOWN = error(404, "api not found")
NO_TOKEN = {"X_Token": ""}
A_TOKEN = "01M7XWXEY84J7ZHDDF71CSKH32"
BULK = b'["hello msg",123456,{"msg": "ok"},["a" ],true,null]'
PARTS = [b'"hello msg"', b"123456", b'{"msg": "ok"}', b'["a" ]', b"true", b"null"]
ATTRIBUTES = {"Enable_Job_Version": "YES", "Job_Attr_Hello": "world", "Job_Attr_Foo_Bar": "Baz"}
WRONG_NAME = "queue name contains forbidden characters"
LONG = "a" * 255

ADMINISTRATION = "nothing is administrated over HTTP, and no queue is named to who has no token"
CENTURY = "a delay has at most 100 years"
DANGLES = "an acknowledged job is gone"
EXPIRED = "an expired job is gone, and eats no call"


def admin(name: str, request: str, status: int, body: str = "", ours: Told = UNKNOWN) -> Row:
    """Return a row of the administration's listener."""
    return differs(name, ADMINISTRATION, request, Told(status, body), ours, headers=NO_TOKEN)


_LIMIT = f"/token/ns1/{A_TOKEN}/limit"
_POST, _PUT = f"POST {_LIMIT}", f"PUT {_LIMIT}"
_LIMITS = '{"read":100,"write":200,"interval":10}'

OF_ADMINISTRATION = [
    admin("POST token", "POST /token/ns1?description=x", 201, '{ "token": "<id>" }'),
    admin("POST token query params", "POST /token/ns1?description=x", 201, '{ "token": "<id>" }'),
    admin("POST token no description", "POST /token/ns1", *error(400, "invalid description")),
    admin("POST token short", "POST /token/ns1?token=short", *error(400, "the user token was too short")),
    admin("POST token user token", f"POST /token/ns1?token={A_TOKEN}", 201, f'{{ "token": "{A_TOKEN}" }}'),
    admin("POST token dup", f"POST /token/ns1?token={A_TOKEN}", *error(400, "the token has already existed")),
    admin("POST token bad pool", "POST /token/ns1?pool=none", *error(400, "the pool was not exists")),
    admin("POST token pool mig", "POST /token/ns1?pool=mig", 201, '{ "token": "mig:<id>" }'),
    admin("POST token pool: in token", f"POST /token/ns1?token=mig:{A_TOKEN}", 201, f'{{ "token": "mig:{A_TOKEN}" }}'),
    admin("POST token bad ns", "POST /token/n.s", *error(400, "namespace name contains forbidden characters")),
    admin("GET tokens", "GET /token/ns1", 200, '{ "tokens": { "<id>": "x" } }'),
    admin("GET tokens pool", "GET /token/ns1?pool=mig", 200, '{ "tokens": { "mig:<id>": "x" } }'),
    admin("GET tokens bad pool", "GET /token/ns1?pool=none", *error(400, "the pool was not exists")),
    admin("GET tokens unknown ns", "GET /token/ns2", 200, '{ "tokens": {} }'),
    admin("DELETE token", f"DELETE /token/ns1/{A_TOKEN}", 204),
    admin("DELETE token unknown", "DELETE /token/ns1/unknown", 204),
    admin("DELETE token bad pool", f"DELETE /token/ns1/{A_TOKEN}?pool=none", *error(400, "the pool was not exists")),
    admin("GET pools", "GET /pools", 200, '[ "default", "mig" ]'),
    admin("GET pools/", "GET /pools/", 301, '<a href="/pools">Moved Permanently</a>.'),
    admin("GET info", "GET /info", 200, "{}", error(401, "token not found")),
    admin("GET info bad pool", "GET /info?pool=none", 200, "", error(401, "token not found")),
    admin("GET limits", "GET /limits", 200, "[]"),
    admin("POST limit", _POST, 201, f'{{"limiter":{_LIMITS}}}'),
    admin("POST limit dup", _POST, *error(500, f"throttler token({A_TOKEN}) has already exists")),
    admin("GET limit", f"GET {_LIMIT}", 200, _LIMITS),
    admin("GET limits, one", "GET /limits", 200, f'[{{"namespace":"ns1","token":"{A_TOKEN}","limiter":{_LIMITS}}}]'),
    admin("PUT limit", _PUT, 200, '{"limiter":{"read":1000,"write":2000,"interval":10}}'),
    admin("POST limit zero rw", _POST, 400, '{"limiter":{"read":0,"write":0,"interval":10}}'),
    admin("POST limit no interval", _POST, *error(400, "interval should be > 0")),
    admin("POST limit bad json", _POST, 400, '{"error":{}}'),
    admin("POST limit wrong type", _POST, 400, '{"error":{"Value":"string","Type":{},"Offset":11,"Field":"read"}}'),
    admin("POST limit negative", _POST, *error(500, "the read and write of limiter can't be <= 0 at the same time")),
    admin("DELETE limit", f"DELETE {_LIMIT}", 200, '{"msg":"success"}'),
    admin("GET limit none", f"GET {_LIMIT}", 404, "null"),
    admin("GET accesslog", "GET /accesslog", 200, '{"status":"disabled"}'),
    admin("POST accesslog enable", "POST /accesslog?status=enable", 200, '{"status":"enabled"}'),
    admin("POST accesslog disable", "POST /accesslog?status=disable", 200, '{"status":"disabled"}'),
    admin("POST accesslog bad", "POST /accesslog?status=x", *error(400, "invalid status")),
    admin("GET unknown admin", "GET /unknown", 404, "404 page not found"),
    admin("metrics head", "GET /metrics", 200, "# HELP", error(401, "token not found")),
    admin("GET info, at the end", "GET /info", 200, '{ "ns1": [ "qj", "qexp" ] }', error(401, "token not found")),
]

REFUSED = [
    fails("no token", "GET /api/ns1/q1", 401, "token not found", headers=NO_TOKEN),
    fails("bad token", "GET /api/ns1/q1", 401, "invalid token", headers={"X_Token": A_TOKEN}),
    fails("bad pool token", "GET /api/ns1/q1", 404, "pool not found", headers={"X_Token": f"nopool:{A_TOKEN}"}),
    same("token in query", "GET /api/ns1/q1?token=<token>", *NO_JOB, headers=NO_TOKEN),
    same("404 route", "GET /api/ns1", *UNKNOWN),
    same("404 method POST", "POST /api/ns1/q1", *UNKNOWN),
    same("trailing slash GET", "GET /api/ns1/q1/", *UNKNOWN),
    same("trailing slash PUT", "PUT /api/ns1/q1/", *UNKNOWN),
    fails("bad ns", "PUT /api/n.s/q1", 400, "namespace name contains forbidden characters"),
    fails("bad queue PUT", "PUT /api/ns1/q:1", 400, WRONG_NAME),
    fails("underscore queue PUT", "PUT /api/ns1/_q", 400, WRONG_NAME),
    same("underscore queue GET", "GET /api/ns1/_q", *NO_JOB),
    fails("long queue PUT", f"PUT /api/ns1/{LONG}a", 400, "namespace or queue name too long"),
]

PUBLISH = [
    published("255 queue PUT", f"/api/ns1/{LONG}"),
    published("publish", "/api/ns1/q1?delay=0&ttl=100&tries=3"),
    published("publish defaults, empty body", "/api/ns1/q2", b""),
    fails("publish ttl<delay", "PUT /api/ns1/q1?delay=10&ttl=5", 400, "ttl is shorter than delay"),
    published("publish ttl=0 delay", "/api/ns1/qd?delay=10&ttl=0"),
    fails("publish bad delay", "PUT /api/ns1/q1?delay=x", 400, "invalid delay"),
    fails("publish empty delay", "PUT /api/ns1/q1?delay=", 400, "invalid delay"),
    fails("publish float delay", "PUT /api/ns1/q1?delay=1.5", 400, "invalid delay"),
    differs(
        "publish max delay",
        CENTURY,
        "PUT /api/ns1/qd?delay=4294967295&ttl=0",
        Told(201, '{"job_id":"<id>","msg":"published"}'),
        error(400, "invalid delay"),
    ),
    fails("publish over max delay", "PUT /api/ns1/q1?delay=4294967296", 400, "invalid delay"),
    fails("publish bad ttl", "PUT /api/ns1/q1?ttl=-1", 400, "invalid ttl"),
    fails("publish bad tries", "PUT /api/ns1/q1?tries=65536", 400, "invalid tries"),
    fails("publish tries 0", "PUT /api/ns1/q1?tries=0", 400, "tries shouldn't be zero"),
    published("publish 1MiB", "/api/ns1/qbig", bytes(range(256)) * 4096),
    fails("publish 1MiB+1", "PUT /api/ns1/qbig", 413, "body too large", sent=bytes(1_048_577)),
]

LOOK = [
    same("size", "GET /api/ns1/q1/size", 200, sized("q1", 1), after=("publish",), headers=NO_TOKEN),
    same("size no token other ns", "GET /api/anyns/q1/size", 200, sized("q1", 0, "anyns"), headers=NO_TOKEN),
    same(
        "peek queue",
        "GET /api/ns1/q1/peek",
        200,
        job("q1", "<id of publish>", b"hello", tries=3, ttl=100),
        after=("publish",),
    ),
    fails("peek empty", "GET /api/ns1/qe/peek", 404, "the queue is empty"),
    fails("peek queue no token", "GET /api/ns1/q1/peek", 401, "token not found", headers=NO_TOKEN),
]

CONSUME = [
    same(
        "consume",
        "GET /api/ns1/q1?ttr=10",
        200,
        taken("q1", "<id of publish>", b"hello", tries=2, ttl=100),
        after=("publish",),
    ),
    same(
        "consume empty body job",
        "GET /api/ns1/q2",
        200,
        taken("q2", "<id of publish defaults, empty body>", b""),
        after=("publish defaults, empty body",),
    ),
    same("consume none", "GET /api/ns1/qe", *NO_JOB),
    fails("consume bad ttr", "GET /api/ns1/q1?ttr=x", 400, "invalid ttr"),
    fails("consume bad timeout", "GET /api/ns1/q1?timeout=x", 400, "invalid timeout"),
    fails("consume count 0", "GET /api/ns1/q1?count=0", 400, "invalid count"),
    fails("consume count 101", "GET /api/ns1/q1?count=101", 400, "invalid count"),
    fails("consume count x", "GET /api/ns1/q1?count=x", 400, "invalid count"),
    fails("consume ,", "GET /api/ns1/,", 400, "invalid queue name(s)"),
    same("consume multi", "GET /api/ns1/qe,qf", *NO_JOB),
]

# Jobs that rows need, and that are no answers of their own.
_PREPARED = [
    *[published(f"dead m{n}", "/api/ns1/qbatch", f"m{n}".encode()) for n in (1, 2, 3)],
    published("of qj", "/api/ns1/qj?ttl=100"),
]
_BATCH = ("dead m1", "dead m2", "dead m3")

BATCHES = [
    same(
        "batch consume 2",
        "GET /api/ns1/qbatch?count=2",
        200,
        f"[{taken('qbatch', '<id of dead m1>', b'm1')},{taken('qbatch', '<id of dead m2>', b'm2')}]",
        after=_BATCH,
    ),
    same(
        "batch consume rest",
        "GET /api/ns1/qbatch?count=2",
        200,
        f"[{taken('qbatch', '<id of dead m3>', b'm3')}]",
        after=(*_BATCH, "batch consume 2"),
    ),
    same(
        "batch consume none",
        "GET /api/ns1/qbatch?count=2",
        *NO_JOB,
        after=(*_BATCH, "batch consume 2", "batch consume rest"),
    ),
]

_DELETE = "/api/ns1/qj/job/<id of of qj>"

JOBS = [
    same("peek job", f"GET {_DELETE}", 200, job("qj", "<id of of qj>", b"hello", tries=0, ttl=100), after=("of qj",)),
    fails("peek job unknown", "GET /api/ns1/qj/job/01M7XWXFHD51X03GYZGR000000", 404, "job not found"),
    same("delete job", f"DELETE {_DELETE}", 204, after=("of qj",)),
    same("delete job again", f"DELETE {_DELETE}", 204, after=("of qj", "delete job")),
    differs(
        "peek queue after ack (dangling id)",
        DANGLES,
        "GET /api/ns1/qj/peek",
        Told(200, job("qj", "<id of of qj>", b"", tries=0, ttl=0)),
        error(404, "the queue is empty"),
        after=("of qj", "delete job"),
    ),
    differs(
        "size after ack (dangling id counted)",
        DANGLES,
        "GET /api/ns1/qj/size",
        Told(200, sized("qj", 1)),
        Told(200, sized("qj", 0)),
        after=("of qj", "delete job"),
    ),
    published("republish", _DELETE, b"new", after=("of qj",)),
]

IN_BULK = [
    published("bulk", "/api/ns1/qbulk?ttl=10", BULK),
    same("bulk consume 1", "GET /api/ns1/qbulk", 200, taken("qbulk", "<id of bulk>", BULK, ttl=10), after=("bulk",)),
    same("bulk consume 5", "GET /api/ns1/qbulk?count=5", *NO_JOB, after=("bulk", "bulk consume 1")),
    fails("bulk not array", "PUT /api/ns1/qbulk2/bulk", 400, "request body should be an array of objects", sent=b"{}"),
    same(
        "bulk real",
        "PUT /api/ns1/qbulk2/bulk?ttl=10",
        201,
        '{"job_ids":[' + ",".join(['"<id>"'] * 6) + '],"msg":"published"}',
        sent=BULK,
    ),
    same(
        "bulk real consume",
        "GET /api/ns1/qbulk2?count=10",
        200,
        f"[{','.join(taken('qbulk2', '<id>', part, ttl=10) for part in PARTS)}]",
        after=("bulk real",),
    ),
    fails("bulk empty", "PUT /api/ns1/qbulk2/bulk", 400, "no jobs", sent=b"[]"),
    fails("bulk 65", "PUT /api/ns1/qbulk2/bulk", 400, "too many jobs", sent=json.dumps([1] * 65).encode()),
]

ATTRIBUTED = [
    published("attr job", "/api/ns1/qattr?ttl=100", b"v1", job="<id+>", headers=ATTRIBUTES),
    same(
        "attr consume",
        "GET /api/ns1/qattr",
        200,
        taken("qattr", "<id of attr job>", b"v1", ttl=100, attributes='{"foo-bar":"Baz","hello":"world"}'),
        after=("attr job",),
    ),
    published("version w/o attrs", "/api/ns1/qattr?ttl=100", b"v1", job="<id+>", headers={"Enable_Job_Version": "yes"}),
    same(
        "consume it",
        "GET /api/ns1/qattr",
        200,
        taken("qattr", "<id of version w/o attrs>", b"v1", ttl=100),
        after=("version w/o attrs",),
    ),
    published("html escape", "/api/ns1/qhtml", b"<a>&"),
]

_DEAD = "/api/ns1/qbatch/deadletter"

DEAD = [
    same("deadletter peek qbatch", f"GET {_DEAD}", 200, dead("qbatch", 3, "<id of dead m1>"), after=(three_are_dead,)),
    same("deadletter size", f"GET {_DEAD}/size", 200, sized("qbatch", 3), after=(three_are_dead,), headers=NO_TOKEN),
    same("deadletter peek none", "GET /api/ns1/qnone/deadletter", 200, dead("qnone", 0)),
    fails("deadletter respawn bad limit", f"PUT {_DEAD}?limit=0", 400, "invalid limit"),
    fails("deadletter respawn bad ttl", f"PUT {_DEAD}?ttl=x", 400, "invalid ttl"),
    same("deadletter respawn default", f"PUT {_DEAD}", 200, '{"count":1,"msg":"respawned"}', after=(three_are_dead,)),
    same(
        "consume respawned",
        "GET /api/ns1/qbatch",
        200,
        taken("qbatch", "<id of dead m1>", b"m1"),
        after=(three_are_dead, "deadletter respawn default"),
    ),
    same("deadletter delete 1", f"DELETE {_DEAD}", 204, after=(two_are_dead,)),
    same("deadletter delete 10", f"DELETE {_DEAD}?limit=10", 204, after=(two_are_dead,)),
    fails("deadletter delete bad", f"DELETE {_DEAD}?limit=x", 400, "invalid limit"),
    same("deadletter respawn none", f"PUT {_DEAD}", 200, '{"count":0,"msg":"respawned"}'),
    same("destroy", "DELETE /api/ns1/q1", 204, after=("publish",)),
    same("destroy unknown", "DELETE /api/ns1/qunknown", 204),
]

_TTL_1 = "expired in queue consume non-blocking: publish ttl=1"
_EXPIRED: tuple[Step, ...] = (_TTL_1, "then live one", first_has_expired)
_LIVE = "<id of then live one>"

EXPIRING = [
    published(_TTL_1, "/api/ns1/qexp?ttl=1", b"dead"),
    published("then live one", "/api/ns1/qexp?ttl=100", b"live"),
    differs(
        "peek expired head",
        EXPIRED,
        "GET /api/ns1/qexp/peek",
        Told(200, job("qexp", f"<id of {_TTL_1}>", b"", tries=0, ttl=0)),
        Told(200, job("qexp", _LIVE, b"live", tries=1, ttl=100)),
        after=_EXPIRED,
    ),
    differs(
        "consume 1 (expired eats the call)",
        EXPIRED,
        "GET /api/ns1/qexp",
        NO_JOB,
        Told(200, taken("qexp", _LIVE, b"live", ttl=100)),
        after=_EXPIRED,
    ),
    differs(
        "consume 2",
        EXPIRED,
        "GET /api/ns1/qexp",
        Told(200, taken("qexp", _LIVE, b"live", ttl=98)),
        NO_JOB,
        after=(*_EXPIRED, "consume 1 (expired eats the call)"),
    ),
]

_THROTTLED = '{{"msg":"token(<token>) {} reach the limit rate, please retry later"}}'

THROTTLED = [
    published("throttle 1", "/api/ns1/qthr", b"x", after=(one_of_each,)),
    same("throttle 2", "PUT /api/ns1/qthr", 429, _THROTTLED.format("produce"), after=("throttle 1",)),
    same(
        "throttle read ok",
        "GET /api/ns1/qthr",
        200,
        taken("qthr", "<id of throttle 1>", b"x"),
        after=("throttle 1", "throttle 2"),
    ),
    same(
        "throttle read 404 refunds? (empty)",
        "GET /api/ns1/qthr",
        429,
        _THROTTLED.format("consume"),
        after=("throttle 1", "throttle read ok"),
    ),
]

PARTS_OF_TABLE = (
    *(OF_ADMINISTRATION, REFUSED, PUBLISH, LOOK, CONSUME, BATCHES),
    *(JOBS, IN_BULK, ATTRIBUTED, DEAD, EXPIRING, THROTTLED),
)
ANSWERS = [row for part in PARTS_OF_TABLE for row in part]
ROWS = {row.name: row for row in [*ANSWERS, *_PREPARED]}
