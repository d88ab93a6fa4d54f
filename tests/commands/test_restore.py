from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from django.db import connection
from django.utils import timezone

from django_delayq import cancel_message, requeue_message, reschedule_message, signals
from django_delayq.api import pausing
from django_delayq.broker.base import Entry, Put
from django_delayq.broker.redis import RedisBroker
from django_delayq.core.exceptions import BrokerUnavailable
from django_delayq.core.states import State
from django_delayq.core.verdicts import Verdict
from django_delayq.models import Message, Queue
from django_delayq.models.messages import Identity
from django_delayq.record import transitions
from django_delayq.record.reads import identity
from django_delayq.record.sql import statements
from django_delayq.record.sql.moves import move
from django_delayq.record.sql.postgresql import HEADS
from django_delayq.restore import engine, filling
from django_delayq.restore.engine import Restore
from django_delayq.restore.selection import Overdue, Selection
from tests.support.commands import broker, claim, due_tenths, held, run, schedule
from tests.support.receivers import heard
from tests.support.record_of import log_of
from tests.support.rows import unguarded
from tests.support.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


def record() -> list[tuple[Any, ...]]:
    return list(Message.objects.order_by("pk").values_list("pk", "state", "due_at", "moves"))


def previewed(**options: Any) -> Restore:
    job = Restore("default", broker(), **options)
    job.preview()
    return job


def begin_load(there: RedisBroker) -> tuple[int | None, int] | None:
    """Begin to load Redis as a worker does. Return what is to be loaded; None when somebody loads it already."""
    server = there.server()
    return there.load(ahead=60, worker="w", lease=60, identity=identity("default"), server=server, lost=False)


AfterFirst = Callable[[str, Callable[[], object]], AbstractContextManager[None]]


@pytest.fixture
def after_first(monkeypatch: pytest.MonkeyPatch) -> AfterFirst:
    """Have something happen once, after the first call of a method of the broker."""

    @contextmanager
    def happens(method: str, what: Callable[[], object]) -> Iterator[None]:
        original, left = getattr(RedisBroker, method), [what]

        def calling(*given: Any, **named: Any) -> Any:
            answer = original(*given, **named)
            while left:
                left.pop()()
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(RedisBroker, method, calling)
            yield

    return happens


def everything(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}  # type: ignore[misc]


# --- what is put ------------------------------------------------------------------------------------------------------


def test_a_restore_after_a_flush_puts_exactly_the_scheduled_messages_within_the_horizon() -> None:
    soon = schedule(3)
    overdue = schedule(2, due=-100)
    later = schedule(2, due=86_400)
    running = schedule(1, due=-1)
    claim(*running)
    dead, cancelled = schedule(2)
    transitions.give_up("default", [dead], reason="")
    cancel_message(cancelled)
    elsewhere = schedule(1, queue="elsewhere")

    with heard(signals.messages_restored) as restored:
        ran = run("delayq_restore", "--json")

    assert ran.code == 0
    assert held() == {**due_tenths(*soon), **dict.fromkeys(overdue, 0)}
    assert held("elsewhere") == due_tenths(*elsewhere)
    total = ran.json["total"]
    assert (total["found"], total["put"], total["present"], total["beyond"]) == (8, 6, 0, 2)
    assert (total["overdue"], total["running"]) == (2, 1)
    assert not set(later) & held().keys()
    assert [(facts["queue"], facts["found"], facts["put"]) for facts in restored] == [
        ("default", 7, 5),
        ("elsewhere", 1, 1),
    ]
    assert all(facts["actor"].startswith("command:delayq_restore ") for facts in restored)
    # Nothing is left for a loader.
    meta = broker().read_meta()
    assert meta.loaded_tenths == meta.horizon_tenths is not None


def test_the_horizon_is_that_of_the_settings(settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "HORIZON": "30s"}
    near, _far = schedule(1, due=20), schedule(1, due=40)
    ran = run("delayq_restore", "--json")
    assert held().keys() == set(near)
    assert ran.json["total"]["beyond"] == 1


def test_a_second_restore_changes_nothing_and_a_dry_run_foresees_that(redis_client: redis.Redis) -> None:
    ids = schedule(23) + schedule(5, due=-20)
    # Batches end amid messages with one due time.
    unguarded(Message).filter(pk__in=ids[:23]).update(due_at=timezone.now() + timedelta(seconds=60))
    run("delayq_restore", batch_size=4)
    assert held().keys() == set(ids)
    before = {key: value for key, value in everything(redis_client).items() if not key.endswith(b"meta")}

    for more in (["--dry-run"], []):
        total = run("delayq_restore", "--json", *more).json["total"]
        assert (total["put"], total["present"], total["held"]) == (0, 28, 28)
        assert {key: value for key, value in everything(redis_client).items() if not key.endswith(b"meta")} == before


def test_messages_beyond_the_horizon_are_left_to_the_worker_that_loads_the_queue() -> None:
    redis_broker = broker()
    begun = begin_load(redis_broker)
    assert begun is not None
    ids, later = schedule(2, due=-20), schedule(2, due=300)
    redis_broker.remove("default", ids)

    ran = run("delayq_restore", "--json")

    assert (ran.code, ran.json["complete"], ran.json["total"]["put"]) == (0, True, 2)
    assert set(held()) == set(ids)
    assert not set(later) & set(held())
    # The load of the queue is not finished.
    assert redis_broker.read_meta().horizon_tenths == begun[1]


def test_messages_put_by_producers_during_a_restore_stay_as_they_are() -> None:
    ids = schedule(30)
    job = previewed(batch_size=10)
    added: list[int] = []

    def producer(done: int) -> None:
        added.extend(schedule(1, due=30))
        reschedule_message(ids[-1], delay="2m")

    job.run(progress=producer)

    assert held() == due_tenths(*ids, *added)


def test_a_partial_restore_leaves_the_loading_to_a_worker() -> None:
    ids = schedule(3)
    run("delayq_restore", str(ids[0]))
    meta = broker().read_meta()
    assert meta.horizon_tenths is not None
    assert meta.loaded_tenths is None
    assert begin_load(broker()) is not None


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--queue", "b"], {"later b", "b"}),
        (["--topic", "t.effect"], {"effect"}),
        (["--due-before", "SPLIT"], {"a", "b", "effect"}),
        (["--due-after", "SPLIT"], {"later b"}),
        (["A", "LATER"], {"a", "later b"}),
        (["A", "LATER", "--queue", "b"], {"later b"}),
        ([], {"a", "b", "effect", "later b"}),
    ],
)
def test_selectors_narrow_the_restored_messages(words: list[str], chosen: set[str]) -> None:
    [a] = schedule(queue="a")
    [b] = schedule(queue="b")
    [effect] = schedule(queue="a", topic="t.effect")
    [later] = schedule(queue="b", due=300)
    names = {a: "a", b: "b", effect: "effect", later: "later b"}
    split = (timezone.now() + timedelta(seconds=180)).isoformat()
    words = [{"SPLIT": split, "A": str(a), "LATER": str(later)}.get(word, word) for word in words]

    ran = run("delayq_restore", "--json", *words)

    assert {names[pk] for pk in (*held("a"), *held("b"))} == chosen
    assert ran.json["total"]["put"] == ran.json["total"]["found"] == len(chosen)


# --- what is overdue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CANCELLED, State.DEAD])
def test_overdue_messages_end_and_leave_redis_and_can_be_requeued(state: State) -> None:
    overdue, soon = schedule(7, due=-20), schedule(2)
    [running] = schedule(1, due=-20)
    claim(running)
    run("delayq_restore")
    policy, before = "dead" if state == State.DEAD else "cancel", record()
    refused = run("delayq_restore", "--overdue", policy)
    assert (refused.code, "--yes" in refused.err, record() == before) == (2, True, True)

    with heard(signals.message_cancelled, signals.message_dead) as ended:
        ran = run("delayq_restore", "--json", "--overdue", policy, "--yes", batch_size=3)

    assert (ran.json["total"][state], ran.json["total"]["present"]) == (7, 2)
    assert held() == due_tenths(*soon)
    assert [facts["message_id"] for facts in ended] == overdue
    for message in Message.objects.filter(pk__in=overdue):
        assert message.state == state
        last = log_of(message)[-1]
        assert "restore: overdue" in last.reason
        assert last.actor.startswith("command:delayq_restore ")
    assert Message.objects.get(pk=running).cancel_requested is False
    assert requeue_message(Message.objects.filter(pk__in=overdue)) == {Verdict.REQUEUED: 7}


def test_what_follows_overdue_messages_that_end_is_in_redis() -> None:
    ended = schedule(2, due=-20, on_dead="t.effect", on_expired="t.ok")
    expired = schedule(2, due=-20, on_dead="t.effect", on_expired="t.ok", expires="10s")
    with heard(signals.message_scheduled) as told:
        assert run("delayq_restore", "--no-expired", "--overdue", "dead", "--yes").code == 0
    followed = Message.objects.exclude(pk__in=ended + expired).order_by("topic", "pk")
    found = [(message.topic, message.payload and message.payload["id"]) for message in followed]
    assert found == [*(("t.effect", pk) for pk in ended), *(("t.ok", pk) for pk in expired)]
    assert held().keys() == {message.pk for message in followed} == {facts["message_id"] for facts in told}


def test_overdue_spread_spreads_due_times_evenly() -> None:
    overdue = schedule(10, due=-100, queue="a") + schedule(10, due=-100, queue="b")
    soon = schedule(2)
    # What expires takes no part of the time.
    schedule(5, due=-20, queue="a", expires="10s")
    began = timezone.now()
    assert run("delayq_restore", "--overdue", "spread=500s").code == 2

    ran = run("delayq_restore", "--json", "--no-expired", "--overdue", "spread=500s", "--yes", batch_size=3)

    total = ran.json["total"]
    assert (total["expired"], total["overdue"], total["spread"], total["put"]) == (5, 20, 20, 22)
    dues = list(Message.objects.filter(pk__in=overdue).order_by("due_at").values_list("due_at", flat=True))
    assert began <= dues[0] <= timezone.now()
    offsets = [(due - dues[0]).total_seconds() for due in dues]
    assert offsets == pytest.approx([25 * place for place in range(20)], abs=2)
    assert held() == {**due_tenths(*soon)}
    # Only the first one is due at once.
    assert {**held("a"), **held("b")} == {**due_tenths(*overdue), min(overdue): 0}


@pytest.mark.parametrize("is_by_id", [False, True], ids=["by due time", "by id"])
def test_messages_due_before_a_time_are_in_redis_again_once_they_are_spread(is_by_id: bool) -> None:
    overdue, later = schedule(10, due=-600), schedule(2, due=86_400)
    run("delayq_restore")
    assert held().keys() == set(overdue)
    words = ["delayq_restore", "--json", "--yes", "--overdue", "spread=5m", "--due-before", timezone.now().isoformat()]
    words += map(str, overdue + later) if is_by_id else []
    would = run(*words, "--dry-run").json["total"]

    did = run(*words).json["total"]

    assert (did["spread"], did["put"]) == (would["spread"], would["put"]) == (10, 10)
    assert held() == {**due_tenths(*overdue), min(overdue): 0}


def test_messages_that_became_due_after_the_count_are_spread_over_the_same_time() -> None:
    schedule(1, due=-600)
    job = previewed(overdue=Overdue.SPREAD, spread=60)
    uncounted = schedule(10, due=-500)
    last = timezone.now() + timedelta(seconds=60)

    job.run()

    assert max(Message.objects.filter(pk__in=uncounted).values_list("due_at", flat=True)) <= last


@pytest.mark.parametrize("policy", ["cancel", "dead", "spread=10m"])
def test_an_overdue_message_rescheduled_meanwhile_is_left_alone(policy: str) -> None:
    [pk, other] = schedule(2, due=-20)
    job = previewed(overdue=Overdue(policy.partition("=")[0]), spread=600, selection=Selection())

    def moved_first(*args: Any, **options: Any) -> Any:
        unguarded(Message).filter(pk=pk).update(due_at=timezone.now() + timedelta(hours=3))
        return move(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_delayq.record.transitions.move", moved_first)
        job.run()

    message = Message.objects.get(pk=pk)
    assert (message.state, message.moves) == (State.SCHEDULED, 1)
    assert Message.objects.get(pk=other).moves == 2


@pytest.mark.parametrize("policy", ["cancel", "dead", "spread"])
def test_an_overdue_message_claimed_meanwhile_goes_on(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [pk, other] = schedule(2, due=-20)
    job = previewed(overdue=Overdue(policy), spread=600)

    def claimed_first(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(transitions, "move", move)
        # Somebody resumes the queue.
        job.release()
        claim(pk)
        return move(*args, **options)

    monkeypatch.setattr(transitions, "move", claimed_first)
    total = job.run().total()

    message = Message.objects.get(pk=pk)
    assert (message.state, message.cancel_requested) == (State.RUNNING, False)
    assert total.cancelled + total.dead + total.spread == 1
    assert Message.objects.get(pk=other).moves == 2


def test_no_expired_expires_messages_that_did_not_start_in_time() -> None:
    late = schedule(3, due=-20, expires="10s")
    still = schedule(1, due=-20, expires="10m")

    ran = run("delayq_restore", "--json", "--no-expired")

    assert (ran.json["total"]["expired"], ran.json["total"]["put"]) == (3, 1)
    assert held().keys() == set(still)
    assert set(Message.objects.filter(state=State.EXPIRED).values_list("pk", flat=True)) == set(late)


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["run", "cancel", "dead", "spread=1000s"])
@pytest.mark.parametrize("batches", [0, 1, 3, 5])
def test_a_resumed_restore_ends_like_an_uninterrupted_one(policy: str, batches: int) -> None:
    overdue = schedule(8, due=-100, queue="a") + schedule(8, due=-100, queue="b")
    schedule(8, queue="a")
    schedule(8, queue="b")
    options = {"overdue": Overdue(policy.partition("=")[0]), "spread": 1000.0 * ("=" in policy), "batch_size": 3}
    job = previewed(**options)
    seen: list[int] = []
    job.run(should_stop=lambda: len(seen) >= batches, progress=seen.append)
    assert len(seen) == batches
    assert job.report.position is not None

    second = previewed(**options, resume=job.report.position)
    second.run()

    assert second.report.position is None
    scheduled = Message.objects.filter(state=State.SCHEDULED)
    expected = set(scheduled.values_list("pk", flat=True))
    expected -= set(scheduled.filter(due_at__gt=timezone.now() + timedelta(seconds=599)).values_list("pk", flat=True))
    assert held("a").keys() | held("b").keys() == expected
    if policy in ("cancel", "dead"):
        assert not scheduled.filter(pk__in=overdue)
    if policy.startswith("spread"):
        due = list(scheduled.filter(pk__in=overdue).order_by("due_at").values_list("due_at", flat=True))
        gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(due)]
        assert gaps == pytest.approx([1000 / 16] * 15, abs=0.01)


def test_a_resumed_restore_never_says_that_the_whole_queue_is_loaded(redis_client: redis.Redis) -> None:
    ids = schedule(9)
    job = previewed(batch_size=3)
    seen: list[int] = []
    job.run(should_stop=lambda: bool(seen), progress=seen.append)
    # What was put before the stop is lost before the restore goes on: only a loader puts it again.
    redis_client.flushall()
    second = previewed(batch_size=3, resume=job.report.position)
    second.run()
    assert held() == due_tenths(*ids[3:])
    meta = broker().read_meta()
    assert meta.horizon_tenths is not None
    assert meta.loaded_tenths is None


@pytest.mark.parametrize(
    ("policy", "number", "code"),
    [
        ("run", signal.SIGTERM, 143),
        ("cancel", signal.SIGTERM, 143),
        ("dead", signal.SIGINT, 130),
        ("spread=1000s", signal.SIGINT, 130),
    ],
)
def test_a_restore_that_was_interrupted_after_a_batch_ends_the_same_when_it_is_begun_again(
    policy: str, number: signal.Signals, code: int, after_first: AfterFirst
) -> None:
    overdue = schedule(20, due=-100)
    soon = schedule(20)
    words = ["delayq_restore", "--json", "--yes", "--overdue", policy]
    with after_first("fill" if policy == "run" else "remove", lambda: os.kill(os.getpid(), number)):
        ran = run(*words, batch_size=5)
    assert (ran.code, ran.json["complete"]) == (code, False)
    assert len(held()) < 40
    of_overdue = Message.objects.filter(pk__in=overdue)
    assert set(of_overdue.values_list("moves", flat=True)) == ({1} if policy == "run" else {1, 2})

    ran = run(*words)
    assert (ran.code, ran.json["complete"]) == (0, True)
    state = {"cancel": State.CANCELLED, "dead": State.DEAD}.get(policy, State.SCHEDULED)
    # Each has moved once: no message is given up or spread twice.
    assert set(of_overdue.values_list("state", "moves")) == {(state, 1 if policy == "run" else 2)}
    assert held().keys() >= set(soon)
    assert (held().keys() & set(overdue) == set()) == (state != State.SCHEDULED)


def test_a_restore_that_loses_redis_fails(after_first: AfterFirst, redis_client: redis.Redis) -> None:
    schedule(50)
    with after_first("fill", redis_client.flushall):
        ran = run("delayq_restore", "--json", batch_size=5)
    assert (ran.code, ran.json["complete"]) == (69, False)


# --- dry run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["run", "cancel", "dead", "spread=0s", "spread=10s", "spread=9d"])
def test_a_dry_run_of_a_restore_writes_nothing_and_foresees_the_same_numbers(
    policy: str, redis_client: redis.Redis
) -> None:
    schedule(4, due=-20)
    schedule(3, due=-20, expires="10s")
    schedule(6)
    schedule(2, due=86_400)
    before, empty = record(), everything(redis_client)
    words = ["delayq_restore", "--json", "--yes", "--no-expired", "--overdue", policy]

    would = run(*words, "--dry-run").json

    assert record() == before
    assert everything(redis_client) == empty
    assert not Identity.objects.exists()
    did = run(*words).json
    for name in ("found", "overdue", "put", "present", "expired", "dead", "cancelled", "spread", "later"):
        assert would["total"][name] == did["total"][name], name
    assert (would["dry_run"], did["dry_run"]) == (True, False)
    assert would["total"]["beyond"] == did["total"]["beyond"] == 2


def test_the_preview_shows_the_oldest_overdue_message() -> None:
    schedule(2, due=-3600)
    ran = run("delayq_restore", "--dry-run")
    assert "Overdue: 2, the oldest since" in ran.out
    assert "(1 h" in ran.out
    assert "Would put 2" in ran.out
    assert ran.err == ""


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--due-before", "2030-01-01T00:00:00"],
        ["--due-before", "0001-01-01T00:00:00Z"],
        ["--due-after", "soon"],
        ["--overdue", "spread"],
        ["--overdue", "run=10m"],
        ["--overdue", "later"],
        ["0"],
        ["9" * 30],
        ["--queue", "{}"],
    ],
)
def test_impossible_options_are_refused(words: list[str]) -> None:
    schedule(1)
    # If the command is called from Python, Django turns exit code 2 of argparse into a CommandError.
    assert run("delayq_restore", *words).code != 0
    assert held() == {}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.postgresql("asks PostgreSQL for its plan")
def test_pages_are_read_along_the_index() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET enable_seqscan = off")
        cursor.execute("SET enable_bitmapscan = off")
        try:
            now = timezone.now()
            page: dict[str, Any] = {"queues": ["default"], "due": now, "id": 5, "end": now, "limit": 1000}
            cursor.execute("EXPLAIN " + HEADS, page)
            plan = "\n".join(line for (line,) in cursor.fetchall())
        finally:
            cursor.execute("RESET ALL")
    assert "Index Only Scan using delayq_todo" in plan
    assert "Sort" not in plan
    assert "ROW(due_at, id) >" in plan.partition("Index Cond:")[2]


@pytest.mark.postgresql("asks PostgreSQL for its plan")
def test_selected_ids_are_read_by_primary_key() -> None:
    for pk in schedule(100):
        cancel_message(pk)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE delayq_message")
    # The planner does not know of the many messages that are scheduled from here on.
    chosen = schedule(3_000)[:50]
    rows = Selection(ids=tuple(chosen)).rows("default", "default").filter(pk__in=chosen, due_at__lte=timezone.now())
    with connection.cursor() as cursor:
        # What is in question is the index. Whether these few rows are worth one depends on earlier tests.
        cursor.execute("SET enable_seqscan = off")
        try:
            plan = rows.explain()
        finally:
            cursor.execute("RESET ALL")
    assert "delayq_message_pkey" in plan


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of each batch that was read from the record."""
    read: list[list[int]] = []
    read_page = type(statements("default")).heads

    def heads(*given: Any, **named: Any) -> Any:
        entries = [*read_page(*given, **named)]
        read.append([pk for _queue, pk, *_due in entries])
        return entries

    monkeypatch.setattr(type(statements("default")), "heads", heads)
    return read


def test_batches_read_ahead_are_not_put_once_redis_is_away(
    monkeypatch: pytest.MonkeyPatch, batches: list[list[int]]
) -> None:
    schedule(9)
    ending, shutdown = threading.Event(), ThreadPoolExecutor.shutdown
    tried: list[dict[str, list[Entry]]] = []

    def shut(pool: ThreadPoolExecutor, *given: Any, **named: Any) -> None:
        ending.set()
        shutdown(pool, *given, **named)

    def fill(broker: RedisBroker, entries: dict[str, list[Entry]]) -> dict[str, Put]:
        tried.append(entries)
        if len(tried) == 1:
            eventually(lambda: len(batches) > engine.BATCHES_AHEAD, "others are read")
        else:
            # The second put may begin before the failure of the first is noticed.
            assert ending.wait(60)
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut)
    monkeypatch.setattr(RedisBroker, "fill", fill)
    ran = run("delayq_restore", "--json", batch_size=1)
    assert (ran.code, ran.json["complete"]) == (69, False)
    assert len(tried) <= 2


def test_a_failed_renewal_ends_a_restore_and_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule(9)
    job = previewed(batch_size=1)

    def loaded(*_given: Any, **_named: Any) -> bool:
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(filling, "RENEWAL_INTERVAL", 0.0)
    monkeypatch.setattr(RedisBroker, "loaded", loaded)
    # The error keeps the frame in which it was raised alive, so the thread must have ended by itself.
    with pytest.raises(BrokerUnavailable) as failed:
        job.run()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("delayq-restore")]
    assert failed.type is BrokerUnavailable


def test_a_restore_reads_a_few_batches_ahead_and_keeps_their_order(
    monkeypatch: pytest.MonkeyPatch, batches: list[list[int]]
) -> None:
    schedule(9)
    put: list[list[int]] = []
    waits, result, filling_in = threading.Event(), Future.result, RedisBroker.fill

    def wait(answer: Future[Any], timeout: float | None = None) -> Any:
        waits.set()
        return result(answer, timeout)

    def slowly(broker: RedisBroker, entries: dict[str, list[Entry]]) -> dict[str, Put]:
        if not put:
            # The first batch is put when the others are read that may be, and the reader waits for this put.
            assert waits.wait(60)
            assert len(batches) == engine.BATCHES_AHEAD + 1
        put.append([entry.id for some in entries.values() for entry in some])
        return filling_in(broker, entries)

    monkeypatch.setattr(Future, "result", wait)
    monkeypatch.setattr(RedisBroker, "fill", slowly)
    found = run("delayq_restore", "--json", batch_size=1).json["total"]
    assert found["put"] == 9
    assert put == batches[:9]


def test_the_end_of_one_restore_ends_no_pause_of_another() -> None:
    """One user restores two queues in two terminals."""
    for queue in ("a", "b"):
        schedule(due=-600, queue=queue)
    one, other = (
        previewed(selection=Selection(queues=(queue,)), overdue=Overdue.SPREAD, spread=600) for queue in ("a", "b")
    )
    one.hold()
    other.run()
    assert set(pausing.paused("default")) == {"a"}


def test_a_restore_renews_its_pause_while_it_expires_messages() -> None:
    for queue in ("a", "b"):
        schedule(due=-600, queue=queue)
        schedule(due=-20, queue=queue, expires="10s")
    job = previewed(overdue=Overdue.CANCEL, no_expired=True, renew_after=0.0)
    soon = timezone.now() + timedelta(seconds=1)
    ends: list[datetime | None] = []

    def progress(done: int) -> None:
        if job.report.total().expired and len(ends) < 2:
            ends.append(Queue.objects.get(name="a").resumes_at)
            Queue.objects.update(resumes_at=soon)

    job.run(progress=progress)

    assert all(end is not None and end > soon for end in ends)
    assert job.report.total().expired == len(ends) == 2
