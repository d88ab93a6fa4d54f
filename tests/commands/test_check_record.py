"""``delayq_check record``: rows that contradict themselves."""

from __future__ import annotations

import json

import pytest

from django_delayq.core.states import State
from django_delayq.models import Message
from tests.support.commands import run
from tests.support.rows import unguarded
from tests.support.steps import bring

pytestmark = pytest.mark.django_db


def test_a_record_in_order_is_told_so() -> None:
    for state in State:
        bring(state)
    ran = run("delayq_check", "record")
    assert (ran.code, ran.out) == (0, "No row of a message contradicts itself.\n")


@pytest.mark.postgresql("SQLite refuses such a row by itself")
def test_rows_that_contradict_themselves_are_counted_and_named() -> None:
    ids = [bring(State.SCHEDULED) for _ in range(7)]
    unguarded(Message).filter(pk__in=ids).update(moves=0)
    ran = run("delayq_check", "record")
    told = run("delayq_check", "record", "--json")
    unguarded(Message).filter(pk__in=ids)._raw_delete("default")
    assert ran.code == 3
    assert f"the rows of 7 messages contradict themselves: {', '.join(map(str, ids[:5]))} …" in ran.err
    assert json.loads(told.out)["inconsistent"] == 7


def test_an_option_of_another_check_is_refused() -> None:
    assert run("delayq_check", "record", "--fix").code == 2
