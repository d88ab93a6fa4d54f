from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import cancel_message
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import reads, transitions
from tests.support.commands import held, run, schedule
from tests.support.rows import unguarded

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("puts_are_flushed")]


def cancelled(number: int = 1, **options: Any) -> list[int]:
    ids = schedule(number, **options)
    cancel_message(Message.objects.filter(pk__in=ids))
    return ids


def dead(number: int = 1, **options: Any) -> list[int]:
    ids = schedule(number, **{"due": -20, **options})
    transitions.give_up("default", ids, reason="")
    return ids


def scheduled() -> dict[int, Message]:
    return {message.pk: message for message in Message.objects.filter(state=State.SCHEDULED)}


def test_a_mistaken_cancel_is_undone_at_the_old_due_times() -> None:
    ids = schedule(5, due=300)
    run("delayq_restore")
    before = {message.pk: message.due_at for message in Message.objects.all()}
    assert run("delayq_act", "cancel", "--topic", "t.ok", "--yes").code == 0
    assert not held()

    ran = run("delayq_act", "requeue", "--topic", "t.ok", "--state", "cancelled", "--yes")

    assert (ran.code, ran.out) == (0, "5 requeued\n")
    assert {pk: message.due_at for pk, message in scheduled().items()} == before
    assert held().keys() == set(ids)


def test_the_question_says_when_how_many_messages_will_run() -> None:
    soon, _old = cancelled(3, due=300), dead(2)
    first, last = (Message.objects.get(pk=pk).due_at for pk in (soon[0], soon[-1]))
    times = [at.isoformat(timespec="milliseconds").replace("+00:00", "Z") for at in (first, last)]
    later = f"3 at their own due times, from {times[0]} to {times[1]}"
    for words, expected in (
        ([], f"{later}, 2 at once."),
        (["--spread", "10m"], f"{later}, 2 over 10 m from now on."),
        (["--due-at", "now"], "5 at once."),
        (["--due-at", "now", "--spread", "10m"], "5 over 10 m from now on."),
        (["--due-at", "3h", "--spread", "10m"], "5 in 3 h over 10 m from then on."),
        (
            ["--due-at", "2050-01-01T12:00:00Z", "--spread", "10m"],
            "5 at 2050-01-01T12:00:00.000Z over 10 m from then on.",
        ),
    ):
        ran = run("delayq_act", "requeue", "--queue", "default", *words)
        assert ran.code == 2
        assert f"This will requeue 5 messages: {expected}" in ran.err
        would = run("delayq_act", "requeue", "--queue", "default", "--dry-run", *words)
        assert would.out == "5 would be requeued\n" + expected.rstrip(".") + "\n"
    assert not scheduled()


def test_the_question_counts_no_message_whose_key_is_taken_among_those_to_come() -> None:
    (refused,), (kept,), (old,) = cancelled(due=300, key="k"), cancelled(due=600), dead()
    schedule(key="k")
    at = Message.objects.get(pk=kept).due_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    words = ["delayq_act", "requeue", *map(str, (refused, kept, old)), "--dry-run"]
    assert f"1 at their own due times, from {at} to {at}, 1 at once" in run(*words).out
    would = run(*words, "--json").json
    assert would["answers"] == {"requeued": 2, "key taken": 1}
    assert would["due_to_come"] == 1


def test_now_makes_all_messages_due_now_and_spread_spreads_them() -> None:
    ids = cancelled(4, due=300)
    before = reads.now("default")
    assert run("delayq_act", "requeue", *map(str, ids), "--due-at", "now", "--spread", "40m", "--yes").code == 0
    waits = [(scheduled()[pk].due_at - before).total_seconds() for pk in ids]
    assert waits == pytest.approx([0, 600, 1200, 1800], abs=30)
    assert waits == sorted(waits)


def test_selectors_narrow_the_requeued_messages() -> None:
    dead_here, dead_there, young, old = (*dead(), *dead(queue="b"), *cancelled(), *cancelled())
    unguarded(Message).filter(pk=old).update(finished_at=timezone.now() - timedelta(days=2))
    live = set(schedule(2))
    for words, chosen in (
        (["--state", "dead", "--queue", "b"], {dead_there}),
        (["--state", "dead"], {dead_here}),
        (["--finished-after", "1d"], {young}),
        (["--finished-before", (timezone.now() - timedelta(days=1)).isoformat()], {old}),
    ):
        before = set(scheduled())
        assert run("delayq_act", "requeue", *words).code == 2
        assert set(scheduled()) == before
        assert run("delayq_act", "requeue", "--yes", *words).code == 0
        assert set(scheduled()) - before == chosen
    assert set(scheduled()) == live | {dead_here, dead_there, young, old}


def test_a_requeue_may_name_the_due_time_or_a_delay() -> None:
    [first, second] = dead(2)
    at = (timezone.now() + timedelta(hours=3)).replace(microsecond=0)
    assert run("delayq_act", "requeue", str(first), "--due-at", at.isoformat()).code == 0
    assert run("delayq_act", "requeue", str(second), "--due-at", "3h").code == 0
    assert scheduled()[first].due_at == at
    assert abs(scheduled()[second].due_at - at) < timedelta(minutes=5)
    ids, noon = cancelled(2), "2050-01-01T12:00:00Z"
    assert run("delayq_act", "requeue", *map(str, ids), "--due-at", noon, "--spread", "10m", "--yes").code == 0
    assert [scheduled()[pk].due_at.minute for pk in ids] == [0, 5]


def test_a_requeue_may_say_how_long_after_its_due_time_a_message_may_start() -> None:
    [short, long, as_before, plain] = [*dead(), *dead(), *dead(expires="2h"), *dead()]
    assert run("delayq_act", "requeue", str(short), "--due-at", "3h", "--expires", "90s").code == 0
    assert run("delayq_act", "requeue", str(as_before)).code == 0
    lives = {pk: message.expires_at and message.expires_at - message.due_at for pk, message in scheduled().items()}
    assert lives == {short: timedelta(seconds=90), as_before: timedelta(hours=2)}
    cancel_message(as_before)
    for words, expected in (
        (["--expires", "1h"], "expires 1 h after its due time"),
        (["--expires", "never"], "never expires"),
    ):
        would = run("delayq_act", "requeue", str(as_before), str(plain), "--due-at", "now", *words, "--dry-run")
        assert would.out == f"2 would be requeued\n2 at once, each {expected}\n"
        assert run("delayq_act", "requeue", str(as_before), str(plain), *words, "--yes").code == 0
        life = timedelta(hours=1) if "1h" in words else None
        assert [scheduled()[pk].expires_at for pk in (as_before, plain)] == [
            life and scheduled()[pk].due_at + life for pk in (as_before, plain)
        ]
        cancel_message(Message.objects.filter(pk__in=[as_before, plain]))
    for words in (["requeue", str(long), "--expires", "0"], ["requeue", str(long), "--expires", "soon"]):
        assert "argument --expires: " in run("delayq_act", *words).err
    assert "--expires" in run("delayq_act", "run", str(short), "--expires", "1h").err
