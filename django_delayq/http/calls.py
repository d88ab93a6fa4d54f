"""The calls of lmstfy's wire, each by the calls of the queue: publish, consume, acknowledge, peek, dead letters."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from math import ceil
from typing import Any, ClassVar, Literal

from django.db import router, transaction
from django.db.models import QuerySet

from .. import __version__, extensions
from ..api import actions, scheduling
from ..core import actors
from ..core.durations import Duration
from ..core.exceptions import InvalidMessage, PayloadTooLarge
from ..core.states import LIVE, State
from ..core.values import CENTURY, YEAR
from ..core.verdicts import Verdict
from ..models import Message
from ..models.messages import not_expired
from ..project import pulled, registry
from ..pull import Pulled
from ..pull.answering import succeed, succeed_current
from ..pull.ending import end_what_is_over
from ..pull.receipts import Receipt
from ..pull.taking import InThread, PullCall
from ..record import reads, transitions
from ..record.sql import statements
from ..record.sql.rows import NewMessage
from . import jobs, rates, tokens
from .exchange import DIGITS, Request, RequestRefused, refuse_if

MOST_JOBS, MOST_ATTRIBUTES = 64, 16
# No size in an answer is larger.
MOST_COUNTED = 100_000
# What the function of a handler for limit keys raises when it gets a body that nobody has checked.
LIMIT_KEY_ERRORS = (AttributeError, LookupError, TypeError, ValueError)
# The characters that are kept of the name and of the value of an attribute.
NAME_KEPT, VALUE_KEPT = 32, 128
UINT16, UINT32 = 2**16 - 1, 2**32 - 1

Told = tuple[int] | tuple[int, Any]


class Call:
    """One request: its namespace, queues and parameters. ``begin`` checks these, and ``answer`` answers."""

    # The right that the token of the call needs; "": everybody may make it.
    right: ClassVar[str] = "consume"
    # The kind of call as which a limit of its token counts it; "": it is not counted.
    verb: ClassVar[str] = ""
    counted: rates.Counted | None = None

    def __init__(self, request: Request, namespace: str, names: Sequence[str] = (), job: str = "") -> None:
        self.request, self.namespace, self.names = request, namespace, names
        self.queues = [jobs.queue_of(namespace, name) for name in names]
        self.job = job
        self.using = router.db_for_write(Message)

    @property
    def queue(self) -> str:
        return self.queues[0]

    def begin(self) -> None:
        """Check the token and the parameters, and take what there is. Raises ``RequestRefused``."""
        if self.right:
            token = tokens.check(self.namespace, self.request.token, self.right)
            self.counted = rates.count(token, self.verb, self.request.token) if self.verb else None
        self.check()

    def check(self) -> None:
        """Check the parameters."""

    def settle(self, status: int) -> None:
        """Do not count the request if it has published nothing and got nothing."""
        if self.counted is not None and status not in (200, 201):
            counted, self.counted = self.counted, None
            counted.take_back()

    @property
    def waits(self) -> bool:
        """Whether the answer has to wait."""
        return False

    def answer(self) -> Told:
        """Do what was asked for; return the status and the content."""
        raise NotImplementedError

    def number(self, name: str, default: int, most: int = UINT32, least: int = 0) -> int:
        """Return a parameter that is a whole number."""
        text = self.request.query.get(name)
        if text is None:
            return default
        if not DIGITS.fullmatch(text) or not least <= int(text) <= most:
            raise RequestRefused(400, f"invalid {name}")
        return int(text)

    def named(self, **facts: Any) -> dict[str, Any]:
        """Return an answer that names the queue."""
        return {"namespace": self.namespace, "queue": self.names[0], **facts}

    @property
    def rows(self) -> QuerySet[Message]:
        """The messages of the queue."""
        return Message.objects.using(self.using).filter(queue=self.queue)

    @property
    def due(self) -> QuerySet[Message]:
        """The messages of the queue that may be taken now."""
        now = reads.now(self.using)
        return self.rows.filter(not_expired(now), state=State.SCHEDULED, due_at__lte=now).order_by("due_at", "id")

    def acting(self) -> Any:
        """Return a context in which the log names the namespace as the actor."""
        return actors.acting_as(f"http:{self.namespace}")


def facts_of(message: Message | Pulled, published_at: int, now: datetime) -> dict[str, Any]:
    """Return the facts that every answer has about a job, which was published at that time (ms)."""
    left = 0 if message.expires_at is None else max(1, ceil((message.expires_at - now).total_seconds()))
    return {
        "attributes": jobs.attributes_of(message.headers),
        "data": base64.b64encode(jobs.body_of(message.payload, message.headers)).decode(),
        "elapsed_ms": max(0, int(now.timestamp() * 1000) - published_at),
        "job_id": jobs.job_id(message.id, published_at, message.headers),
        "ttl": left,
    }


class Publish(Call):
    """PUT of one job."""

    right, verb = "publish", rates.PRODUCE

    def check(self) -> None:
        self.delay = self.number("delay", 0)
        ttl = self.number("ttl", 86_400)
        self.tries = self.number("tries", 1, UINT16)
        refuse_if(self.tries == 0, "tries shouldn't be zero")
        refuse_if(self.delay > CENTURY, "invalid delay")
        refuse_if(0 < ttl < self.delay, "ttl is shorter than delay")
        # The TTL counts from the publish, while ``expires`` counts from the due time.
        self.expires: Duration | bool = min(max(ttl - self.delay, 0.001), CENTURY) if ttl else False
        nobody = f"nobody receives the queue {self.queue}: it is declared nowhere"
        refuse_if(not jobs.has_receiver(self.queue), nobody)
        self.attributes = self._attributes()
        self.bodies = self.read()

    def read(self) -> list[bytes]:
        """Return the bodies of the jobs."""
        return [self.request.body]

    def _attributes(self) -> dict[str, str] | None:
        if self.request.headers.get("enable-job-version", "").upper() != "YES":
            return None
        start = "job-attr-"
        found = {
            name.removeprefix(start)[:NAME_KEPT]: value[:VALUE_KEPT]
            for name, value in self.request.headers.items()
            if name.startswith(start)
        }
        refuse_if(len(found) > MOST_ATTRIBUTES, "too many attributes, cannot exceed 16")
        return found

    def publish(self) -> list[str]:
        """Schedule the jobs, and return their ids."""
        try:
            news = [self._new(body) for body in self.bodies]
        except InvalidMessage as error:
            # The body does not fit the handler.
            raise RequestRefused(400, str(error)) from None
        except LIMIT_KEY_ERRORS as error:
            raise RequestRefused(400, f"the body does not fit the limit_key of its handler: {error!r}") from None
        with self.acting():
            written = scheduling.write_all_checked(self.using, news)
        return [*map(jobs.id_of, written)]

    def _new(self, body: bytes) -> NewMessage:
        (value, payload, headers), topic = jobs.stored(body, self.attributes), jobs.topic_of(self.queue)
        options = {"queue": self.queue, "delay": self.delay, "expires": self.expires, "headers": headers}
        options["max_attempts"] = min(self.tries, 10_000)
        try:
            return scheduling.checked(topic, value, options)
        except PayloadTooLarge:
            handler = registry.find(topic)
            if handler is not None and (handler.payload or handler.limit_key):
                # The handler has to see the payload.
                raise
            # This door has a bound of its own.
            return scheduling.checked(topic, None, options)._replace(payload=payload, value=None)

    def answer(self) -> Told:
        return 201, {"job_id": self.publish()[0], "msg": "published"}


class PublishBulk(Publish):
    """PUT of many jobs, each of which is an element of an array."""

    def read(self) -> list[bytes]:
        text = self.request.body.decode("utf-8", "surrogateescape")
        try:
            found = [*_elements(text)]
        except ValueError:
            raise RequestRefused(400, "request body should be an array of objects") from None
        refuse_if(not found, "no jobs")
        refuse_if(len(found) > MOST_JOBS, "too many jobs")
        return [element.encode("utf-8", "surrogateescape") for element in found]

    def answer(self) -> Told:
        return 201, {"job_ids": self.publish(), "msg": "published"}


# The text before the first element of an array, and behind each element. Group 1 is the end of the array, if it comes.
_BLANK = r"[ \t\r\n]*"
_END = rf"(\]{_BLANK}\Z)"
_BEFORE, _BEHIND = re.compile(rf"{_BLANK}\[{_BLANK}{_END}?"), re.compile(rf"{_BLANK}(?:,{_BLANK}|{_END})")
_decode = json.JSONDecoder().raw_decode


def _elements(text: str) -> Iterator[str]:
    """Yield the texts of the elements of a JSON array. Raises ``ValueError`` for anything else."""
    found = _BEFORE.match(text)
    while found is not None and found[1] is None:
        begin = found.end()
        try:
            _value, end = _decode(text, begin)
        except RecursionError:
            raise ValueError from None
        yield text[begin:end]
        found = _BEHIND.match(text, end)
    if found is None:
        raise ValueError


class Republish(Publish):
    """PUT of a job in the place of another one: both or neither."""

    verb = ""

    def answer(self) -> Told:
        with transaction.atomic(using=self.using):
            end(self)
            return super().answer()


class Consume(Call):
    """GET of jobs: ``found`` holds them before ``answer`` is called. Jobs that nobody receives go back."""

    verb = rates.CONSUME
    found: Sequence[Pulled] = ()

    def check(self) -> None:
        ttr = min(self.number("ttr", 120), YEAR)
        timeout = min(self.number("timeout", 0), YEAR)
        self.count = self.number("count", 1, 100, 1)
        try:
            self.taking = PullCall(self.queues, self.count, timeout, ttr, self.using)
        except ValueError as error:
            # A queue is not declared as pulled.
            raise RequestRefused(400, str(error)) from None

    def begin(self) -> None:
        super().begin()
        self.found = self.taking.fetch()

    def wait(self) -> None:
        """Wait in this thread for what falls due."""
        self.found = self.taking.later()

    async def await_(self, run: InThread) -> None:
        """Wait in a coroutine for what falls due."""
        self.found = await self.taking.alater(run)

    @property
    def waits(self) -> bool:
        return not self.found and self.taking.left > 0

    def settle(self, status: int) -> None:
        super().settle(status)
        if self.found and status != 200:
            self.taking.give_back(self.found)

    def answer(self) -> Told:
        if not self.found:
            return 404, {"msg": "no job available"}
        names, published = dict(zip(self.queues, self.names, strict=True)), self._published()
        made = [
            {
                **facts_of(each, published[each.id], each.claimed_at),
                "msg": "new job",
                "namespace": self.namespace,
                "queue": names[each.queue],
                "remain_tries": each.attempts_left or 0,
            }
            for each in self.found
        ]
        return 200, made if self.count > 1 else made[0]

    def _published(self) -> dict[int, int]:
        """Return when each job was published."""
        noted = {each.id: jobs.published_at(each.headers) for each in self.found}
        if others := [pk for pk, at in noted.items() if not at]:
            for row in Message.objects.using(self.using).filter(pk__in=others).only("created_at"):
                noted[row.pk] = jobs.published_at({}, row.created_at)
        return noted


def end(call: Call) -> None:
    """End a job as its acknowledgement does: one that was never taken is cancelled."""
    pk = jobs.message_id(call.job)
    with call.acting():
        # The usual case is one statement.
        if pk is None or succeed_current(call.using, call.queue, pk):
            return
        for state, deliveries in call.rows.filter(pk=pk, state__in=LIVE).values_list("state", "deliveries"):
            if state == State.SCHEDULED and deliveries == 0:
                answer = actions.cancel_message(pk, reason="deleted by HTTP", using=call.using)
                if answer.verdict != Verdict.REQUESTED:
                    continue
            # A worker or another program has claimed it, perhaps just now.
            succeed(call.using, [Receipt(pk, max(1, deliveries))])


class Acknowledge(Call):
    """DELETE of a job."""

    def answer(self) -> Told:
        end(self)
        return (204,)


class PeekJob(Call):
    """GET of a job, which stays as it is."""

    def answer(self) -> Told:
        gone = (State.CONSUMED, State.CANCELLED, State.EXPIRED)
        message = self.rows.filter(pk=jobs.message_id(self.job) or 0).exclude(state__in=gone).first()
        if message is None:
            return 404, {"error": "job not found"}
        return 200, self.shown(message, 0)

    def shown(self, message: Message, tries: int) -> dict[str, Any]:
        """Return a job with the tries that it has left."""
        facts = facts_of(message, jobs.published_at(message.headers, message.created_at), reads.now(self.using))
        return self.named(**facts, remain_tries=tries)


class Peek(PeekJob):
    """GET of the first job that is due, which stays as it is."""

    def answer(self) -> Told:
        message = self.due.first()
        if message is None:
            return 404, {"error": "the queue is empty"}
        used = message.attempts + message.crashes
        attempts = pulled.policy(self.queue, message.retry, message.max_attempts).attempts
        return 200, self.shown(message, max(0, (attempts or UINT16) - used))


def _count(rows: QuerySet[Message]) -> int:
    """Count jobs up to a bound: a request for a size needs no token, and each job costs the database time."""
    return rows.order_by()[:MOST_COUNTED].count()


class Size(Call):
    """GET of the number of jobs that are due. Everybody may ask."""

    right = ""

    def answer(self) -> Told:
        return 200, self.named(size=_count(self.due))


class Destroy(Call):
    """DELETE of the jobs that are due."""

    right = "manage"

    def answer(self) -> Told:
        with self.acting():
            actions.cancel_message(self.due, reason="the queue was destroyed by HTTP", using=self.using)
        return (204,)


class PeekDead(Call):
    """GET of the oldest dead letter, and of their number."""

    @property
    def dead(self) -> QuerySet[Message]:
        """The dead letters, the oldest first."""
        end_what_is_over(self.using)
        return self.rows.filter(state=State.DEAD).order_by("finished_at", "id")

    def answer(self) -> Told:
        head, size = self.dead.first(), _count(self.dead)
        shown = "" if head is None else jobs.id_of(head)
        return 200, self.named(deadletter_head=shown, deadletter_size=size)


class DeadLetterSize(PeekDead):
    """GET of the number of dead letters. Everybody may ask."""

    right = ""

    def answer(self) -> Told:
        return 200, self.named(size=_count(self.dead))


class DeleteDead(PeekDead):
    """DELETE of the oldest dead letters."""

    right = "manage"

    def check(self) -> None:
        self.limit = self.number("limit", 1, least=1)

    def act(self, action: actions.Action, times: transitions.DueTimes = transitions.NO_TIMES) -> int:
        """Apply an action to the oldest dead letters. Return the number of those that it changed."""
        ids = list(self.dead.values_list("pk", flat=True)[: self.limit])
        with self.acting():
            batches = action.apply_in_batches(self.using, ids, times=times, reason="by HTTP")
            return sum(bool(answer) for answers in batches for answer in answers)

    def answer(self) -> Told:
        self.act(actions.PURGE)
        return (204,)


class Respawn(DeleteDead):
    """PUT of the oldest dead letters into their queue."""

    def check(self) -> None:
        super().check()
        self.ttl = self.number("ttl", 86_400)

    def answer(self) -> Told:
        expires: timedelta | Literal[False] = timedelta(seconds=min(self.ttl, CENTURY)) if self.ttl else False
        number = self.act(actions.REQUEUE, transitions.DueTimes(expires=expires))
        return 200, {"count": number, "msg": "respawned"}


class Version(Call):
    """GET of the version. Everybody may ask."""

    right = ""

    def answer(self) -> Told:
        return 200, {"build_commit": "", "build_date": "", "version": __version__}


class Info(Call):
    """The queues of a namespace in which messages wait. This needs a token that manages it."""

    right = "manage"

    @property
    def start(self) -> str:
        """The text with which the names of the queues of the namespace begin."""
        return f"{self.namespace}{jobs.SEPARATOR}"

    def answer(self) -> Told:
        found = statements(self.using).queues()
        return 200, {self.namespace: [q.removeprefix(self.start) for q in found if q.startswith(self.start)]}


class MetricsPage(Info):
    """What Prometheus reads of a namespace. If no app exposes metrics, there is no such address."""

    def begin(self) -> None:
        refuse_if(extensions.exposition() is None, "api not found", 404)
        super().begin()

    def answer(self) -> Told:
        expose = extensions.exposition()
        assert expose is not None
        return 200, expose(self.using, self.start)


PAGES: Mapping[str, type[Call]] = {"version": Version, "info": Info, "metrics": MetricsPage}
# By the method and the rest of the address behind the queue.
ROUTES: Mapping[tuple[str, str], type[Call]] = {
    ("PUT", ""): Publish,
    ("GET", ""): Consume,
    ("DELETE", ""): Destroy,
    ("PUT", "bulk"): PublishBulk,
    ("GET", "peek"): Peek,
    ("GET", "size"): Size,
    ("PUT", "job/*"): Republish,
    ("GET", "job/*"): PeekJob,
    ("DELETE", "job/*"): Acknowledge,
    ("GET", "deadletter"): PeekDead,
    ("GET", "deadletter/size"): DeadLetterSize,
    ("PUT", "deadletter"): Respawn,
    ("DELETE", "deadletter"): DeleteDead,
}
