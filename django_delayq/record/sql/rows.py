"""The rows that go into the statements and that come out of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ...core.merging import joined
from ...core.states import State

# The position of a message in the order of (due, id).
IndexPosition = tuple[datetime, int]
# Before all messages.
BEGINNING: IndexPosition = (datetime(1970, 1, 1, tzinfo=UTC), 0)


class Span(NamedTuple):
    """The scheduled messages that are read of each queue, up to ``limit``, in their order of (due, id).

    Those behind the position ``after`` and due by ``end`` (None: whenever), and with ``topics`` only those of these.
    """

    end: datetime | None
    after: IndexPosition = BEGINNING
    limit: int = 1000
    topics: Sequence[str] | None = None


# The most messages of a queue that one statement passes over because they may not begin: it bounds its time.
ROWS_PASSED = 5_000


class QueueLook(NamedTuple):
    """What a search of a queue, behind a position, has found ``now``. Positions are None where there is no message.

    A candidate is a message that may begin once it is due: its topic has a handler here, no limit is full, its queue is
    not paused, and it is not expired.
    """

    queue: str
    now: datetime
    # The position of the first scheduled message.
    first: IndexPosition | None = None
    # The position of the first candidate. When ``ROWS_PASSED`` others come first, the position of the last of those,
    # where the next search goes on; then ``is_candidate`` is false.
    position: IndexPosition | None = None
    is_candidate: bool = False

    @property
    def before(self) -> IndexPosition:
        """Right before ``position``."""
        assert self.position is not None
        return self.position[0], self.position[1] - 1

    @property
    def wait(self) -> float | None:
        """The seconds until the message at ``position`` falls due; 0 or less: it is due. None: there is none."""
        return None if self.position is None else (self.position[0] - self.now).total_seconds()

    @property
    def is_due(self) -> bool:
        """True when the message at ``position`` is due."""
        return self.wait is not None and self.wait <= 0


class Expired(NamedTuple):
    """Whether a lease has run out and whether a waiting message has expired, ``now``.

    And when the first lease, and the time of the first message that may expire, is over or will be; None: there is
    none, or the vendor keeps no dead rows.
    """

    leased: bool
    waiting: bool
    now: datetime
    first_leased: datetime | None = None
    first_waiting: datetime | None = None


_decode = json.JSONDecoder().raw_decode


def decoded(text: str) -> Any:
    """Return the value of a JSON column from its text, which has no blank before it: we or the database wrote it."""
    return {} if text == "{}" else _decode(text)[0]


class Reference(NamedTuple):
    """A foreign key of another table to messages: its table and column, quoted as SQL needs them."""

    table: str
    column: str

    def __str__(self) -> str:
        return f"{self.table}.{self.column}".replace('"', "")


class NewMessage(NamedTuple):
    """A checked message that is not written yet. ``due_at`` wins over ``delay``; JSON columns are text."""

    # The payload, and its value if that is known without decoding the text.
    payload: str
    value: dict[str, Any] | None
    due_at: datetime | None = None
    key: str | None = None
    # Messages of one kind have all that follows in common: ``ALIKE_FROM``.
    topic: str = ""
    queue: str = ""
    headers: str = "{}"
    priority: int = 0
    delay: timedelta = timedelta(0)
    expires: timedelta | None = None
    retry: str | None = None
    max_attempts: int | None = None
    # For scheduling only: the choice when another message has its key (a value of OnConflict).
    on_conflict: str = "error"
    # Seconds; a timeout of 0 is none. None: the handler's.
    timeout: float | None = None
    lease: float | None = None
    limit_key: str | None = None
    # The columns that say how long it holds its key.
    key_deliveries: int | None = None
    key_for: float | None = None
    # The id of the message whose handler schedules this one under its own key.
    own: int | None = None
    # Joins the payload of a message that waits and this one's.
    join: Callable[[Any, Any], Any] = joined

    @property
    def content(self) -> Any:
        """The payload as the handler will see it."""
        return decoded(self.payload) if self.value is None else self.value

    def columns(self, due_at: datetime) -> dict[str, Any]:
        """Return what the call decided of the row, as the model has it, with this due time."""
        return {
            "topic": self.topic,
            "queue": self.queue,
            "key": self.key,
            "priority": self.priority,
            "payload": self.content,
            "headers": decoded(self.headers),
            "due_at": due_at,
            "expires_at": None if self.expires is None else due_at + self.expires,
            "retry": None if self.retry is None else decoded(self.retry),
            "max_attempts": self.max_attempts,
            "timeout": self.timeout,
            "lease": self.lease,
            "limit_key": self.limit_key,
            "key_deliveries": self.key_deliveries,
            "key_for": self.key_for,
        }


# The place of the first field that messages of one kind have in common.
ALIKE_FROM = NewMessage._fields.index("topic")


class Inserted(NamedTuple):
    """The id and times that the database chose for a new message."""

    id: int
    due_at: datetime
    created_at: datetime


class ToAnnounce(NamedTuple):
    """What a look has found of messages of which Redis was not told: their ids, and those that are still scheduled.

    ``waiting`` has the queue, the id, the due time (microseconds since 1970) and the priority of each. ``now`` is the
    time by the database's clock.
    """

    now: datetime
    ids: Sequence[int] = ()
    waiting: Sequence[tuple[str, int, int, int]] = ()


class Ticket(NamedTuple):
    """An id that a broker found due, to be claimed.

    ``ready_tenths`` is the due time that Redis has for it, in tenths of a ms since 1970; None when a query found it.
    ``rank`` says how urgent it is for the broker, from 0 (best) to 200. ``until`` is the time in seconds until it falls
    due, above 0 only when it was taken early.
    """

    id: int
    ready_tenths: int | None = None
    rank: int = 0
    until: float = 0.0


# As ``Claiming.overrides``: the claim heeds no change of limits.
ALL_CHANGES = 2**63 - 1


class Claiming(NamedTuple):
    """What a claim asks for: messages by their tickets, of the topics in ``leases`` (topic → seconds).

    ``queue`` None: they may be in any. None is claimed more than ``ahead`` seconds before its due time, whatever its
    ticket says. None is claimed either while the record has a change of limits later than ``overrides``.
    """

    tickets: Sequence[Ticket]
    leases: dict[str, float]
    worker: str
    queue: str | None
    ahead: float
    overrides: int


class Facts(NamedTuple):
    """What decides where the id of a message belongs, and who may claim it."""

    id: int
    # A value of ``State``.
    state: str
    topic: str
    queue: str
    limit_key: str | None
    due_at: datetime
    priority: int


class Claimed(NamedTuple):
    """A message that a worker has just claimed, with all that its delivery needs."""

    id: int
    topic: str
    queue: str
    key: str | None
    priority: int
    payload: Any
    headers: Any
    due_at: datetime
    expires_at: datetime | None
    retry: Any
    max_attempts: int | None
    attempts: int
    deliveries: int
    reported: int
    excused: int
    claimed_at: datetime
    timeout: float | None = None
    lease: float | None = None
    # Reported deliveries that cost no attempt because their transaction met another one.
    conflicts: int = 0
    limit_key: str | None = None


def urgency(row: Any) -> tuple[int, datetime, int]:
    """Return by what messages that are due are sorted: the most urgent first."""
    return -row.priority, row.due_at, row.id


class Success(NamedTuple):
    """A delivery that succeeded. ``result`` is the value that its handler keeps, as JSON; None: there is none."""

    id: int
    delivery: int
    actor: str
    result: str | None = None


class Failure(NamedTuple):
    """A delivery that did not succeed. ``delay`` None keeps the due time, ``payload`` (JSON) None the payload.

    ``counts`` says whether it is an attempt, ``conflict`` whether it is one of the conflicts that are none.
    """

    id: int
    delivery: int
    actor: str
    dead: bool = False
    delay: timedelta | None = None
    counts: bool = True
    reason: str = ""
    error: str = ""
    traceback: str = ""
    exception: str = ""
    payload: str | None = None
    conflict: bool = False
    # True: a message follows the end (``follow_ups``).
    leads_on: bool = False


class LeaseRenewal(NamedTuple):
    """A delivery whose lease is to run for ``lease`` seconds from now. Below 0: if it is over. 0: it is only read."""

    id: int
    delivery: int
    lease: float


class Moved(NamedTuple):
    """A message after its move, without its content. ``follow_up`` is the new message that follows its end."""

    id: int
    topic: str
    queue: str
    priority: int
    after: State
    due_at: datetime
    deliveries: int
    reason: str = ""
    follow_up: Moved | None = None
    # The queue in which it waited before, if that was another one.
    left: str = ""
