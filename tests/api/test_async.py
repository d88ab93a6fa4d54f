"""The async twins of the functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

import django_delayq
from django_delayq import (
    Verdict,
    acancel_message,
    arequeue_message,
    areschedule_message,
    arun_message,
    aschedule_message,
    aschedule_messages,
)
from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.steps import TOPIC, message, moves

pytestmark = pytest.mark.django_db(transaction=True)

VERBS = [name for name in django_delayq.__all__ if name.endswith(("_message", "_messages"))]


def test_every_function_has_an_async_twin() -> None:
    sync = {name for name in VERBS if not name.startswith("a")}
    assert {name for name in VERBS if name.startswith("a")} == {f"a{name}" for name in sync}
    assert len(sync) == 6
    for name in sync:
        assert inspect.iscoroutinefunction(getattr(django_delayq, f"a{name}"))


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


def test_an_async_twin_takes_part_in_the_callers_transaction() -> None:
    class Undo(Exception):
        pass

    with pytest.raises(Undo), transaction.atomic():
        async_to_sync(aschedule_message)(TOPIC)
        assert Message.objects.count() == 1
        raise Undo
    assert not Message.objects.exists()
