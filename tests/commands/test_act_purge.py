from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from django_delayq import Verdict, cancel_message, schedule_message
from django_delayq.core.states import FINAL, State
from django_delayq.management import _common as common
from django_delayq.models import Message, Transition
from django_delayq.record import purge as purging
from django_delayq.record import transitions
from django_delayq.record.purge import purge
from django_delayq.record.sql.sessions import lock_timeout
from django_delayq.worker.upkeep import janitor
from django_delayq.worker.upkeep.janitor import Janitor
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.commands import claim, run, schedule
from tests.support.referring import ON_DELETE, table
from tests.support.rows import unguarded

pytestmark = pytest.mark.django_db(transaction=True)


def make_finished(number: int, *, days: float, state: State = State.CANCELLED, **more: Any) -> list[int]:
    """Make messages that finished ``days`` ago."""
    ids = schedule(number, **more)
    if state == State.DEAD:
        transitions.give_up("default", ids, reason="")
    else:
        cancel_message(Message.objects.filter(pk__in=ids))
    unguarded(Message).filter(pk__in=ids).update(finished_at=timezone.now() - timedelta(days=days))
    return ids


def left() -> set[int]:
    return set(Message.objects.values_list("pk", flat=True))


def test_purge_deletes_old_finished_messages_with_their_log_and_no_live_ones() -> None:
    make_finished(5, days=40)
    young = make_finished(2, days=20)
    live = schedule(3) + schedule(3, due=-50)
    claim(live[-1])
    unguarded(Message).update(created_at=timezone.now() - timedelta(days=400))

    ran = run("delayq_act", "purge", "--finished-before", "30d", "--json", "--yes", batch_size=2)

    assert (ran.code, ran.json["answers"]) == (0, {"purged": 5})
    assert left() == {*young, *live}
    assert set(Transition.objects.values_list("message_id", flat=True)) == left()
    assert run("delayq_act", "purge", "--finished-before", "0s", "--yes").code == 0
    assert run("delayq_act", "purge", "--finished-before", "0s", "--state", "scheduled").code != 0
    assert sum(purge(purging.finished("default", [State.SCHEDULED, State.RUNNING], 0.0))) == 0
    assert left() == set(live)


def test_a_signal_stops_a_purge_after_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    make_finished(10, days=40)

    def interrupted(*given: Any, **named: Any) -> Iterator[int]:
        for size in purge(*given, **named):
            os.kill(os.getpid(), signal.SIGTERM)
            yield size

    monkeypatch.setattr(purging, "purge", interrupted)
    ran = run("delayq_act", "purge", "--finished-before", "30d", "--json", "--yes", batch_size=3)
    assert (ran.code, ran.json["answers"].get("purged", 0), len(left())) == (143, 3, 7)


def test_a_message_requeued_between_two_batches_is_not_purged() -> None:
    [pk, other] = make_finished(2, days=40)
    delete = purge(purging.finished("default", FINAL, 86_400.0), batch_size=1)
    assert next(delete) == 1
    transitions.requeue("default", [other])
    assert list(delete) == []
    assert left() == {other}
    assert pk != other


def test_a_message_that_was_chosen_and_then_requeued_is_not_purged() -> None:
    ids = make_finished(2, days=40)
    transitions.requeue("default", ids[:1])
    assert purging.purge_ids("default", ids) == {ids[0]: Verdict.TOO_LATE, ids[1]: Verdict.PURGED}
    assert left() == set(ids[:1])


def test_a_locked_message_is_not_purged() -> None:
    if not connections["default"].features.has_select_for_update_skip_locked:
        pytest.skip("locks rows")
    locked, *_others = make_finished(4, days=40)
    (chosen,) = make_finished(1, days=0)
    second = connections.create_connection("default")
    try:
        second.set_autocommit(False)
        with second.cursor() as cursor:
            cursor.execute("SELECT 1 FROM delayq_message WHERE id = %s FOR UPDATE", [locked])
        assert not transaction.get_connection().in_atomic_block
        with connections["default"].cursor() as cursor:
            cursor.execute("SET lock_timeout = '1s'")
        with lock_timeout(1000):
            assert sum(purge(purging.finished("default", FINAL, 86_400.0), batch_size=1)) == 3
            verdicts = purging.purge_ids("default", [locked, chosen])
            assert verdicts == {locked: Verdict.TOO_LATE, chosen: Verdict.PURGED}
    finally:
        second.close()
        connections["default"].close()
    assert left() == {locked}


@pytest.mark.parametrize("of_the_caller", [False, True])
@pytest.mark.postgresql
def test_a_purge_leaves_the_settings_of_the_session_alone(*, of_the_caller: bool) -> None:
    make_finished(5, days=40)
    with transaction.atomic() if of_the_caller else nullcontext():
        assert list(purge(purging.finished("default", FINAL, 86_400.0), batch_size=2)) == [2, 2, 1]
        # In the transaction of a caller the purge is not alone: that commit has to be on the disk.
        with connections["default"].cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            assert cursor.fetchone() == ("on",)
    assert left() == set()


def test_selectors_narrow_the_purged_messages() -> None:
    made: list[Any] = [{"queue": "b", "topic": "t.effect"}, {"queue": "b"}, {"queue": "c"}, {}]
    effect, b, c, default = (make_finished(1, days=1, **options)[0] for options in made)
    (dead,) = make_finished(1, days=1, state=State.DEAD)
    for words, chosen in (
        (["--topic", "t.effect"], {effect}),
        (["--state", "dead"], {dead}),
        (["--queue", "b", "--queue", "c", "--topic", "t.ok"], {b, c}),
    ):
        before = left()
        would = run("delayq_act", "purge", "--finished-before", "0s", "--dry-run", "--json", *words)
        assert would.json["answers"] == {"purged": len(chosen)}
        assert run("delayq_act", "purge", "--finished-before", "0s", "--yes", *words).code == 0
        assert before - left() == chosen
    assert left() == {default}


def test_messages_that_finish_while_a_purge_asks_are_not_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    old, [live] = make_finished(3, days=40), schedule()

    def answer(_command: Any, what: str, *, yes: bool) -> None:
        assert "3 messages" in what
        cancel_message(live)

    monkeypatch.setattr(common.DelayqCommand, "confirm", answer)
    ran = run("delayq_act", "purge", "--finished-before", "0s", "--json")
    assert (ran.json["answers"].get("purged", 0), left()) == (3, {live})
    assert live not in old


def test_a_message_that_holds_its_key_after_its_end_is_not_purged() -> None:
    def finished(key: str, *, seconds: float, unique: str) -> int:
        pk = schedule_message("t.ok", key=key, unique=unique, delay="1h").pk
        assert cancel_message(pk)
        unguarded(Message).filter(pk=pk).update(finished_at=timezone.now() - timedelta(seconds=seconds))
        return pk

    held = finished("held", seconds=3590, unique="1h")
    for key, unique in (("over", "59m"), ("other", "scheduled")):
        finished(key, seconds=3590, unique=unique)
    assert run("delayq_act", "purge", "--finished-before", "10s", "--yes").code == 0
    assert left() == {held}
    # A person who purges this very message frees its key.
    assert purging.purge_ids("default", [held]) == {held: Verdict.PURGED}
    assert not schedule_message("t.ok", key="held", unique="1h").existed


# --- the janitor ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pruner(monkeypatch: pytest.MonkeyPatch) -> Janitor:
    """A janitor with batches of two messages, each of which takes half a second by its clock."""
    seconds = itertools.count(0.0, 0.5)
    monkeypatch.setattr(janitor, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return Janitor("default", UpkeepTuning(prune_batch=2))


def test_the_janitor_prunes_one_batch_at_a_time_and_rests_after_each(
    pruner: Janitor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_delayq")
    consumed, dead = make_finished(3, days=40), make_finished(1, days=100, state=State.DEAD)
    young = make_finished(1, days=20) + make_finished(1, days=40, state=State.DEAD)
    seen = []
    for _ in range(4):
        wait = pruner.tick()
        seen.append((wait, left() - set(young)))
    rest, interval = 0.5 * pruner.tuning.rest, pruner.tuning.prune_interval
    assert seen == [(rest, {consumed[2], *dead}), (rest, set(dead)), (rest, set()), (interval, set())]
    assert left() == set(young)
    assert [record.getMessage() for record in caplog.records] == [
        "Pruned 3 messages that finished more than 30 d ago",
        "Pruned 1 messages that finished more than 90 d ago",
    ]


def test_the_janitor_begins_anew_after_an_error(pruner: Janitor, monkeypatch: pytest.MonkeyPatch) -> None:
    make_finished(4, days=40)
    with monkeypatch.context() as patched:
        patched.setattr(janitor, "purge", breaks_after_a_batch)
        pruner.tick()
        with pytest.raises(OperationalError):
            pruner.tick()
    assert len(left()) == 2
    assert pruner.tick() < pruner.tuning.prune_interval
    assert left() == set()


def breaks_after_a_batch(*arguments: Any, **options: Any) -> Iterator[int]:
    yield next(purge(*arguments, **options))
    raise OperationalError("the server is gone")


# --- foreign keys of the project --------------------------------------------------------------------------------------


@pytest.fixture(params=["SET_NULL"])
def receipts(transactional_db: None, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Any]]:
    """A function that makes a row of the project refer to a message, by a key with this ``on_delete``."""
    with table(ON_DELETE[request.param]) as refer:
        yield refer


@pytest.mark.parametrize("receipts", ON_DELETE, indirect=True)
def test_the_janitor_passes_over_messages_that_rows_refer_to_and_names_them(
    receipts: Callable[[int], Any], pruner: Janitor, caplog: pytest.LogCaptureFixture
) -> None:
    consumed, dead = make_finished(5, days=40), make_finished(3, days=100, state=State.DEAD)
    receipt, *_others = [receipts(pk) for pk in (*consumed[:2], dead[1])]
    for _round in range(2):
        while pruner.tick() < pruner.tuning.prune_interval:
            pass
    assert left() == {*consumed[:2], dead[1]}
    # Once, and not at each of the janitor's rounds.
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Tests: receipt.message_id refer to" in line
    assert f"such as {consumed[0]}, {consumed[1]}" in line
    receipt.delete()
    pruner.tick()
    assert left() == {consumed[1], dead[1]}


@pytest.mark.parametrize("is_by_id", [True, False], ids=["by id", "by selector"])
def test_a_purge_by_command_foresees_which_messages_stay_and_names_the_key(
    receipts: Callable[[int], object], is_by_id: bool
) -> None:
    first, *others = make_finished(3, days=40)
    (live,) = schedule()
    receipts(first)
    receipts(live)
    chosen = [*map(str, (first, *others, 10**12, live))] if is_by_id else ["--finished-before", "30d"]
    refused = {"referred to": 1, "too late": 1, "not found": 1} if is_by_id else {}
    dry = run("delayq_act", "purge", *chosen, "--dry-run", "--json")
    ran = run("delayq_act", "purge", *chosen, "--yes", "--json")
    assert ran.json["answers"] == {"purged": 2, **refused}
    assert (dry.json["answers"], dry.code) == (ran.json["answers"], ran.code)
    assert left() == {first, live}
    again = run("delayq_act", "purge", *chosen, "--yes").err
    (line,) = [line for line in again.splitlines() if line.startswith("Passed over")]
    assert f"such as {first}: rows of Tests: receipt.message_id refer to" in line


def test_a_foreign_key_without_a_constraint_keeps_no_message() -> None:
    with table(ON_DELETE["SET_NULL"], db_constraint=False) as refer:
        (pk,) = make_finished(1, days=40)
        refer(pk)
        assert run("delayq_act", "purge", "--finished-before", "30d", "--yes").code == 0
        assert left() == set()


@pytest.mark.parametrize("is_asked", [False, True], ids=["yes", "asked"])
def test_the_oldest_of_a_queue_are_purged(monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    said: list[str] = []
    by_age = {days: make_finished(2, days=days) for days in (9, 3, 6)}
    others = [*make_finished(2, days=50, queue="other"), *schedule(2)]
    words = ["delayq_act", "purge", "--queue", "default", "--oldest", "3"]
    assert run(*words, "--dry-run").out == "3 would be purged\n"
    if is_asked:
        monkeypatch.setattr(common.DelayqCommand, "confirm", lambda _command, what, yes: said.append(what))
    ran = run(*words, "--json", *[] if is_asked else ["--yes"], batch_size=2)
    assert (ran.code, ran.json["answers"]) == (0, {"purged": 3})
    assert ["3 messages" in what for what in said] == [True] * is_asked
    assert left().isdisjoint(by_age[9])
    assert left() >= {*by_age[3], *others}
    assert len(left() & set(by_age[6])) == 1
    assert run(*words, "--yes").code == 0
    assert left() == set(others)


@pytest.mark.parametrize(
    "words",
    [["--queue", "a", "--oldest", "0"], ["--queue", "a", "--oldest", "few"], ["--oldest", "3"], ["1", "--oldest", "3"]],
    ids=" ".join,
)
def test_a_purge_of_the_oldest_needs_a_number_and_a_selector(words: list[str]) -> None:
    old = make_finished(2, days=400)
    assert run("delayq_act", "purge", *words, "--yes").code != 0
    assert left() == set(old)


# --- by id, and by moments --------------------------------------------------------------------------------------------


def test_a_purge_by_selectors_without_an_age_is_refused() -> None:
    old = make_finished(2, days=400)
    ran = run("delayq_act", "purge", "--queue", "default", "--yes")
    assert ran.code == 2
    assert "needs --finished-before" in ran.err
    assert run("delayq_act", "purge", "--finished-before=-1d").code != 0
    assert left() == set(old)


def test_an_age_and_a_moment_choose_the_same_messages() -> None:
    old, young = make_finished(2, days=40), make_finished(2, days=20)
    moment = (timezone.now() - timedelta(days=30)).isoformat()
    for before in ("30d", moment):
        assert run("delayq_act", "purge", "--finished-before", before, "--dry-run").out == "2 would be purged\n"
    words = ["--finished-before", moment, "--finished-after", "50d", "--yes"]
    assert run("delayq_act", "purge", *words).code == 0
    assert (left(), len(old)) == (set(young), 2)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("0001-01-01T00:00:00+14:00", "'0001-01-01T00:00:00+14:00' is before 1970"),
        ("9999-12-31T23:59:59-14:00", "is out of range: 9999-12-31T23:59:59-14:00"),
    ],
)
@pytest.mark.parametrize("command", [["delayq_act", "purge", "--finished-before"], ["delayq_restore", "--due-after"]])
def test_a_moment_that_has_no_time_in_utc_is_refused(command: list[str], at: str, words: str) -> None:
    ran = run(*command, at, "--yes")
    assert ran.code != 0
    assert words in ran.err
