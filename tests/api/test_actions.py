"""The actions cancel, reschedule, run now and requeue: by id, by key, as a queryset."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq
from django_delayq import (
    InvalidMessage,
    Verdict,
    acancel_message,
    arequeue_message,
    areschedule_message,
    arun_message,
    aschedule_message,
    aschedule_messages,
    cancel_message,
    requeue_message,
    reschedule_message,
    run_message,
    schedule_message,
    schedule_messages,
)
from django_delayq.api import actions
from django_delayq.core import actors
from django_delayq.core.bounds import LENGTHS
from django_delayq.core.states import State
from django_delayq.models import Message, Transition
from django_delayq.record import reads, transitions
from django_delayq.record.sql.rows import Failure
from django_delayq.record.transitions import DueTimes
from tests.support.commands import set_batch_size
from tests.support.replica import REPLICA
from tests.support.steps import (
    TOPIC,
    ago,
    bring,
    claim,
    claimed,
    due,
    fail,
    later,
    log,
    lose,
    message,
    moves,
    snapshot,
    state,
)

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

# --- cancel's four answers --------------------------------------------------------------------------------------------


def test_a_cancelled_message_never_runs() -> None:
    row = due()
    answer = cancel_message(row.pk, reason="paid")
    assert (answer.verdict, answer.state, answer.id, bool(answer)) == (Verdict.CANCELLED, State.CANCELLED, row.pk, True)
    assert claim(row.pk) == []
    assert message(row.pk).finished_at is not None
    assert log(row.pk)[-1].reason == "paid"


def test_a_cancel_of_a_running_message_is_requested_and_logged_once() -> None:
    row = claimed()
    for _ in range(2):
        answer = cancel_message(row.id)
        assert (answer.verdict, answer.state) == (Verdict.REQUESTED, State.RUNNING)
    assert message(row.id).cancel_requested
    assert message(row.id).leased_until is not None
    assert moves(row.id) == ["scheduled", "scheduled>running", "running>running"]


def test_a_cancel_after_a_crash_has_an_unknown_outcome() -> None:
    row = claimed()
    lose(row.id)
    answer = cancel_message(row.id)
    assert (answer.verdict, answer.state) == (Verdict.OUTCOME_UNKNOWN, State.CANCELLED)
    assert claim(row.id) == []


def test_a_cancel_after_a_reported_failure_has_a_known_outcome() -> None:
    row = claimed()
    transitions.fail("default", [Failure(row.id, 1, "a", delay=timedelta(0))])
    assert cancel_message(row.id).verdict == Verdict.CANCELLED


# --- reschedule, run now, requeue -------------------------------------------------------------------------------------


def test_a_rescheduled_message_is_due_anew_and_keeps_its_time_to_live() -> None:
    id_ = later(expires="1h").pk
    moment = datetime(2050, 1, 1, 12, tzinfo=UTC)
    assert reschedule_message(id_, due_at=moment).verdict == Verdict.RESCHEDULED
    row = message(id_)
    assert row.due_at == moment
    assert row.expires_at == moment + timedelta(hours=1)
    assert moves(id_) == ["scheduled", "scheduled>scheduled"]


@pytest.mark.parametrize(
    ("verb", "where", "times"),
    [
        (reschedule_message, State.SCHEDULED, {}),
        (reschedule_message, State.SCHEDULED, {"due_at": datetime(2050, 1, 1, tzinfo=UTC), "delay": 5}),
        (reschedule_message, State.SCHEDULED, {"delay": -1}),
        (reschedule_message, State.SCHEDULED, {"due_at": datetime(2020, 1, 1, tzinfo=UTC)}),
        (requeue_message, State.DEAD, {"delay": -1}),
        (requeue_message, State.DEAD, {"spread": -1}),
        (requeue_message, State.DEAD, {"spread": "soon"}),
        (requeue_message, State.DEAD, {"delay": "soon"}),
    ],
)
def test_an_impossible_time_is_refused_and_nothing_moves(
    verb: Callable[..., Any], where: State, times: dict[str, Any]
) -> None:
    id_ = bring(where)
    before = snapshot(id_)
    with pytest.raises(InvalidMessage):
        verb(id_, **times)
    assert snapshot(id_) == before


@pytest.mark.parametrize("verb", [run_message, partial(reschedule_message, delay=0)])
def test_a_message_past_its_expiry_that_is_to_be_due_now_may_start(verb: Callable[[int], Any]) -> None:
    # No worker has swept it yet.
    id_ = due(due_at=ago(30), expires="10s").pk
    assert verb(id_).verdict == Verdict.RESCHEDULED
    row = message(id_)
    assert row.expires_at == row.due_at + timedelta(seconds=10)
    claim(id_)
    assert state(id_) == State.RUNNING


@pytest.mark.parametrize("where", [State.DEAD, State.EXPIRED, State.CANCELLED])
def test_a_requeued_message_starts_anew_and_goes_on_counting_deliveries(where: State) -> None:
    id_ = bring(where)
    deliveries = message(id_).deliveries
    assert requeue_message(id_).verdict == Verdict.REQUEUED
    row = message(id_)
    assert (row.state, row.attempts, row.deliveries, row.crashes) == (State.SCHEDULED, 0, deliveries, 0)
    assert row.finished_at is None
    assert not row.cancel_requested
    assert abs(row.due_at - timezone.now()) < timedelta(seconds=10)
    # What had expired has its time to live again.
    assert row.expires_at == (row.due_at + timedelta(seconds=1) if where == State.EXPIRED else None)


@pytest.mark.parametrize("keep", [run_message, partial(schedule_message, TOPIC, key="k", on_conflict="debounce")])
def test_a_message_keeps_its_time_to_live_when_the_due_time_of_its_retry_was_kept(keep: Callable[..., Any]) -> None:
    id_ = due(due_at=ago(30), expires="1h", key="k").pk
    claim(id_)
    fail(id_, delay=timedelta(seconds=0))
    keep(id_) if keep is run_message else keep(due_at=ago(20))
    reschedule_message(id_, delay="2h")
    row = message(id_)
    assert row.expires_at == row.due_at + timedelta(hours=1)


def test_a_requeued_message_keeps_a_due_time_that_is_still_to_come() -> None:
    row = later(expires="1h")
    cancel_message(row.pk)
    assert requeue_message(row.pk).verdict == Verdict.REQUEUED
    assert (message(row.pk).due_at, message(row.pk).expires_at) == (row.due_at, row.expires_at)


def test_a_requeue_goes_no_further_than_a_century() -> None:
    rows = Message.objects.filter(pk__in=[bring(State.DEAD) for _ in range(4)])
    assert requeue_message(rows, delay="36500d", spread="36500d") == {Verdict.REQUEUED: 4}


def waits(ids: list[int], since: datetime) -> list[float]:
    """Return the seconds from a moment to the due time of each message."""
    return [(message(id_).due_at - since).total_seconds() for id_ in ids]


@pytest.mark.usefixtures("_small_batches")
def test_a_requeue_spreads_what_is_due_over_all_batches_and_nothing_else() -> None:
    ids = [bring(State.DEAD) for _ in range(5)]
    others = [*(bring(State.CONSUMED) for _ in range(9)), bring(State.DEAD, key="k"), due(key="k").pk]
    to_come = later()
    cancel_message(to_come.pk)
    ids += [bring(State.DEAD) for _ in range(5)]
    before = reads.now("default")
    counts = requeue_message(Message.objects.filter(pk__in=[*ids, *others, to_come.pk]), spread="100m")
    assert counts == {Verdict.REQUEUED: 11, Verdict.TOO_LATE: 10, Verdict.KEY_TAKEN: 1}
    assert waits(ids, before) == pytest.approx([600.0 * number for number in range(10)], abs=60)
    assert message(to_come.pk).due_at == to_come.due_at


@pytest.mark.parametrize("verb", ["run", "reschedule"])
def test_a_spread_counts_only_the_messages_that_get_a_new_due_time(verb: str) -> None:
    ended = [bring(State.CONSUMED) for _ in range(8)]
    ids = [later().pk for _ in range(4)]
    before = reads.now("default")
    times = DueTimes(delay=timedelta(hours=1) if verb == "reschedule" else None, spread=timedelta(minutes=40))
    for answers in actions.ACTIONS[verb].apply_in_batches("default", [*ended, *ids], times=times):
        assert [answer.verdict for answer in answers] == [Verdict.TOO_LATE] * 8 + [Verdict.RESCHEDULED] * 4
    begin = 3600 if verb == "reschedule" else 0
    assert waits(ids, before) == pytest.approx([begin + 600.0 * number for number in range(4)], abs=60)


def test_one_of_two_messages_with_one_key_is_requeued_and_the_other_refused() -> None:
    ids = []
    for _ in range(2):
        ids.append(due(key="k").pk)
        cancel_message(ids[-1])
    other = bring(State.CANCELLED)
    counts = requeue_message(Message.objects.filter(pk__in=[*ids, other]))
    assert counts == Counter({Verdict.REQUEUED: 2, Verdict.KEY_TAKEN: 1})
    assert Message.objects.filter(pk__in=ids, state=State.SCHEDULED).count() == 1


# --- which message ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name", "words"),
    [
        ((), {}, "name the message by its id, or by topic and key"),
        ((), {"topic": TOPIC}, "name the message by its id, or by topic and key"),
        ((), {"key": "k"}, "name the message by its id, or by topic and key"),
        ((1.5,), {}, "^not the id of a message: float; write a message or its id, or topic= and key=$"),
        *[((number,), {}, "^not the id of a message: ") for number in (0, 2**63, True)],
        (("order-17",), {}, r"not the id.*: str; to name a message by its key, write topic= and key=$"),
    ],
)
def test_an_action_without_a_target_is_refused(target: tuple[Any, ...], name: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        cancel_message(*target, **name)


def test_an_action_takes_a_message_an_id_or_a_topic_and_key() -> None:
    assert cancel_message(later())
    assert cancel_message(later().pk)
    later(key="k")
    assert cancel_message(topic=TOPIC, key="k")
    assert cancel_message(topic=TOPIC, key="k").verdict == Verdict.NOT_FOUND


def test_requeue_by_key_finds_the_youngest_finished_message() -> None:
    for _ in range(2):
        young = due(key="k").pk
        cancel_message(young)
    assert requeue_message(topic=TOPIC, key="k").id == young
    answer = requeue_message(topic=TOPIC, key="k")
    assert (answer.id, answer.verdict, answer.state) == (young, Verdict.TOO_LATE, State.SCHEDULED)


# --- querysets --------------------------------------------------------------------------------------------------------


def test_a_queryset_is_answered_by_the_count_per_verdict_that_was_foreseen() -> None:
    ids = [bring(where) for where in State]
    lost = claimed().id
    lose(lost)
    rows = Message.objects.filter(pk__in=[*ids, lost])
    expected = {Verdict.CANCELLED: 1, Verdict.REQUESTED: 1, Verdict.OUTCOME_UNKNOWN: 1, Verdict.TOO_LATE: 4}
    assert actions.foresee_cancel(rows) == expected
    assert [state(id_) for id_ in ids] == list(State)
    assert cancel_message(rows) == expected


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    set_batch_size(monkeypatch, 2, actions.Action.apply_in_batches)


def waiting() -> QuerySet[Message]:
    return Message.objects.filter(state=State.SCHEDULED).order_by("pk")


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize(
    ("rows", "places"),
    [
        (Message.objects.all, range(10)),
        (lambda: Message.objects.order_by("due_at")[2:5], range(5, 8)),
        # Messages that are moved leave this queryset on the way.
        (lambda: Message.objects.filter(pk__in=waiting().values("pk")[:5]), range(5)),
        (Message.objects.none, range(0)),
    ],
    ids=["all", "ordered slice", "slice in a subquery", "none"],
)
def test_an_action_on_a_queryset_touches_exactly_its_rows(rows: Callable[[], Any], places: range) -> None:
    made = schedule_messages([{"topic": TOPIC, "delay": 100 - number} for number in range(10)])
    meant = [made[place].pk for place in places]
    assert cancel_message(rows()) == ({Verdict.CANCELLED: len(meant)} if meant else {})
    gone = Message.objects.filter(state=State.CANCELLED).order_by("pk")
    assert list(gone.values_list("pk", flat=True)) == meant
    assert requeue_message(gone) == ({Verdict.REQUEUED: len(meant)} if meant else {})


@pytest.mark.usefixtures("_small_batches")
def test_a_message_scheduled_while_a_queryset_is_worked_off_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        later()
    added: list[int] = []
    publish = actions.publish_moves

    def publish_and_schedule(using: str, answers: Any) -> None:
        publish(using, answers)
        added.append(later().pk)

    monkeypatch.setattr(actions, "publish_moves", publish_and_schedule)
    assert cancel_message(Message.objects.all()) == {Verdict.CANCELLED: 5}
    assert {state(id_) for id_ in added} == {State.SCHEDULED}


@committed
@pytest.mark.usefixtures("puts_are_flushed")
def test_an_action_on_many_messages_is_one_put_for_each_queue(redis_client: redis.Redis) -> None:
    def scripts_run() -> int:
        stats = redis_client.info("commandstats")
        return sum(stats[name]["calls"] for name in ("cmdstat_eval", "cmdstat_evalsha") if name in stats)

    # Redis has the script from now on.
    assert run_message(later().pk)
    schedule_messages([{"topic": TOPIC, "delay": "30d", "queue": f"q{number % 2}"} for number in range(20)])
    before = scripts_run()
    assert run_message(Message.objects.filter(queue__in=["q0", "q1"])) == {Verdict.RESCHEDULED: 20}
    assert scripts_run() - before == 2


def test_a_queryset_with_a_message_in_several_rows_counts_it_once() -> None:
    row = later()
    run_message(row.pk)
    assert cancel_message(Message.objects.filter(transitions__number__gte=0)) == {Verdict.CANCELLED: 1}


@pytest.mark.parametrize(
    "rows",
    [
        lambda: Message.objects.values("pk"),
        lambda: Message.objects.values_list("topic", flat=True).distinct(),
        lambda: Message.objects.dates("due_at", "day"),
        lambda: Message.objects.filter(topic="a").union(Message.objects.filter(topic="b")),
        Transition.objects.all,
    ],
    ids=["values", "values_list", "dates", "union", "another model"],
)
def test_a_queryset_that_does_not_stand_for_messages_is_refused(rows: Callable[[], Any]) -> None:
    id_ = later().pk
    with pytest.raises(InvalidMessage, match="queryset"):
        cancel_message(rows())
    assert moves(id_) == ["scheduled"]


@pytest.mark.parametrize("more", [{"topic": TOPIC}, {"topic": TOPIC, "key": "k"}, {"key": "k"}])
def test_messages_together_with_a_topic_or_a_key_are_refused(more: dict[str, str]) -> None:
    row = later(key="k")
    for target in (row, row.pk, Message.objects.all()):
        with pytest.raises(InvalidMessage, match="either"):
            cancel_message(target, **more)
    assert moves(row.pk) == ["scheduled"]


@pytest.mark.django_db(databases=["default", "other"])
def test_a_queryset_of_another_database_is_worked_off_there() -> None:
    here, there = later(), later(using="other")
    assert cancel_message(Message.objects.using("other").all()) == {Verdict.CANCELLED: 1}
    assert state(here.pk) == State.SCHEDULED
    assert state(there.pk, "other") == State.CANCELLED


# --- a replica for reading --------------------------------------------------------------------------------------------

# On each message: the verb, the state in which it finds the message, and that in which it leaves it.
MOVES: list[tuple[Callable[..., Any], State, State]] = [
    (cancel_message, State.SCHEDULED, State.CANCELLED),
    (partial(reschedule_message, delay=60), State.SCHEDULED, State.SCHEDULED),
    (run_message, State.SCHEDULED, State.SCHEDULED),
    (requeue_message, State.CANCELLED, State.SCHEDULED),
]


@pytest.mark.django_db(transaction=True, databases=["default", REPLICA])
@pytest.mark.usefixtures("read_from_a_replica")
@pytest.mark.parametrize("target", ["message", "queryset"])
@pytest.mark.parametrize(("verb", "before", "after"), MOVES)
def test_what_reads_from_a_replica_is_moved_in_the_database_behind_it(
    verb: Callable[..., Any], before: State, after: State, target: str
) -> None:
    id_ = later(using="default").pk if before == State.SCHEDULED else bring(before)
    rows = Message.objects.filter(pk=id_)
    read = rows.get()
    assert read._state.db == REPLICA
    given = read if target == "message" else rows
    answer = verb(given)
    if target == "message":
        assert (bool(answer), answer.state) == (True, after)
    else:
        assert sum(answer.values()) == 1
    assert (state(id_), message(id_).moves > 1) == (after, True)


@pytest.mark.parametrize("act", [cancel_message, partial(reschedule_message, delay=60), run_message, requeue_message])
def test_an_action_reads_no_payloads(act: Callable[..., Any]) -> None:
    """They may be large, and it has a thousand messages in hand at a time."""
    for number in range(3):
        row = later(number)
        if act is requeue_message:
            cancel_message(row)
    with CaptureQueriesContext(connection) as captured:
        assert sum(act(Message.objects.all()).values()) == 3
    assert len(captured) > 0
    assert [query["sql"] for query in captured if re.match('SELECT.*"payload"', query["sql"])] == []


@pytest.mark.parametrize("count", [4, 12])
def test_a_batch_spread_over_a_time_keeps_its_order_and_everything_else(count: int) -> None:
    ids = [later(number, priority=number % 7, expires="1h" if number % 2 else None).pk for number in range(count)]
    moment = datetime(2050, 1, 1, tzinfo=UTC)
    answers = actions.RESCHEDULE.apply("default", ids, times=DueTimes(moment, spread=timedelta(seconds=2 * count)))
    assert all(answers)
    for number, id_ in enumerate(ids):
        row = message(id_)
        assert (row.payload, row.priority, row.moves) == (number, number % 7, 2)
        assert row.due_at == moment + timedelta(seconds=2 * number)
        assert row.expires_at == (row.due_at + timedelta(hours=1) if number % 2 else None)
        assert [entry.due_at for entry in row.transitions.all()][1:] == [row.due_at]


@pytest.mark.parametrize("verb", ["run", "requeue"])
def test_an_action_asks_once_for_the_former_due_times_of_a_batch(verb: str) -> None:
    ids = [claimed(expires=60 * number, due_at=ago(30)).id for number in range(5, 13)]
    for id_ in ids:
        assert fail(id_, delay=timedelta(hours=1), dead=verb == "requeue")
    with CaptureQueriesContext(connection) as captured:
        assert all(actions.ACTIONS[verb].apply("default", ids))
    assert len([query for query in captured if "delayq_transition" in query["sql"]]) == 1
    rows = [message(id_) for id_ in ids]
    assert [row.expires_at and row.expires_at - row.due_at for row in rows] == [
        timedelta(minutes=number) for number in range(5, 13)
    ]


def test_many_messages_moved_together_keep_their_own_counts() -> None:
    ids = [due().pk for _ in range(12)]
    for place, id_ in enumerate(ids):
        for _ in range(place):
            claim(id_)
            lose(id_)
        transitions.cancel("default", [id_])
    assert requeue_message(Message.objects.filter(pk__in=ids)) == {Verdict.REQUEUED: 12}
    rows = [message(id_) for id_ in ids]
    assert [(row.deliveries, row.excused, row.crashes) for row in rows] == [(n, n, 0) for n in range(12)]
    assert all(row.transitions.count() == row.moves for row in rows)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", actions.ACTIONS.values(), ids=lambda action: action.name)
@pytest.mark.parametrize("where", State)
def test_an_action_is_done_in_exactly_its_states(action: actions.Action, where: State) -> None:
    id_ = bring(where)
    before = snapshot(id_)
    (answer,) = action.apply("default", [id_], times=DueTimes(delay=timedelta(minutes=1)), reason="why")
    assert bool(answer) == (where in action.states)
    assert answer.id == id_
    if not answer:
        assert answer.verdict == Verdict.TOO_LATE
        assert action is actions.PURGE or str(answer) == f"too late: {where.value}"
        assert snapshot(id_) == before


# --- who did it -------------------------------------------------------------------------------------------------------


def test_the_log_names_the_actor() -> None:
    with actors.acting_as("user:anna"):
        id_ = due().pk
        with actors.acting_as("command:cancel\n"):
            cancel_message(id_)
    requeue_message(id_)
    assert [row.actor for row in log(id_)] == ["user:anna", "command:cancel?", actors.current()]
    assert actors.current().startswith("process:")


def test_a_very_long_name_of_an_actor_is_cut() -> None:
    with actors.acting_as("x" * 1000):
        id_ = due().pk
    assert message(id_).transitions.get().actor == "x" * LENGTHS.actor


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        (reschedule_message, "countdown", " (write delay)"),
        (reschedule_message, "eta", " (write due_at)"),
        (requeue_message, "countdown", " (write delay)"),
        (requeue_message, "eta", " (write delay)"),
        (cancel_message, "delay", " (write reschedule_message())"),
        (cancel_message, "task_id", " (write target)"),
        (cancel_message, "terminate", " (leave it out)"),
        (run_message, "raeson", " (write reason)"),
    ],
)
def test_an_argument_that_does_not_exist_names_the_one_that_is_meant(
    call: Callable[..., Any], name: str, hint: str
) -> None:
    for each in (call, async_to_sync(getattr(actions, f"a{call.__name__}"))):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) has no such argument: {re.escape(name + hint)}$"):
            each(later(), **{name: 5})


def test_a_reason_may_be_any_text() -> None:
    row = schedule_message("t.ok", delay=60)
    assert cancel_message(row, reason="\x00\ud800" + "x" * 100_000)
    reason = row.transitions.get(to_state=State.CANCELLED).reason
    assert reason.startswith("\ufffd?")
    assert len(reason) < 5_000


# --- async ------------------------------------------------------------------------------------------------------------

VERBS = [name for name in django_delayq.__all__ if name.endswith(("_message", "_messages"))]


def test_every_function_has_an_async_twin() -> None:
    sync = {name for name in VERBS if not name.startswith("a")}
    assert {name for name in VERBS if name.startswith("a")} == {f"a{name}" for name in sync}
    assert len(sync) == 8
    for name in sync:
        assert inspect.iscoroutinefunction(getattr(django_delayq, f"a{name}"))


@committed
def test_the_async_twins_do_what_the_functions_do() -> None:
    async def life() -> list[Any]:
        one = await aschedule_message(TOPIC, {"n": 1}, delay="10m", key="k")
        two, three = await aschedule_messages([{"topic": TOPIC, "delay": 60}, {"topic": TOPIC, "delay": 90}])
        return [
            one.pk,
            await areschedule_message(one, delay=60),
            await arun_message(one.pk),
            await acancel_message(topic=TOPIC, key="k", reason="why"),
            await arequeue_message(one),
            await acancel_message(Message.objects.filter(pk__in=[two.pk, three.pk])),
        ]

    id_, *answers, counts = async_to_sync(life)()
    assert [answer.verdict for answer in answers] == [
        Verdict.RESCHEDULED,
        Verdict.RESCHEDULED,
        Verdict.CANCELLED,
        Verdict.REQUEUED,
    ]
    assert counts == {Verdict.CANCELLED: 2}
    assert message(id_).state == State.SCHEDULED
    assert len(moves(id_)) == 5


@committed
def test_an_async_twin_takes_part_in_the_callers_transaction() -> None:
    with transaction.atomic():
        async_to_sync(aschedule_message)(TOPIC)
        assert Message.objects.count() == 1
        transaction.set_rollback(True)
    assert not Message.objects.exists()
