"""Ended messages are kept for times by the names of their topics and queues."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import cancel_message, requeue_message, schedule_message, schedule_messages
from django_delayq.core.states import State
from django_delayq.models import Message
from django_delayq.record import transitions
from django_delayq.worker.upkeep.janitor import Janitor
from django_delayq.worker.upkeep.upkeep_tuning import UpkeepTuning
from tests.support.rows import unguarded

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

# Small, so that each test sees several of them.
TUNING = UpkeepTuning(walked_together=3, prune_batch=2)


def ended(topic: str, days: float, queue: str = "default", *, state: State = State.CANCELLED, **more: Any) -> int:
    """Make a message that ended ``days`` ago."""
    pk = schedule_message(topic, queue=queue, delay="1h", **more).pk
    if state == State.DEAD:
        transitions.give_up("default", [pk], reason="")
    else:
        cancel_message(pk)
    unguarded(Message).filter(pk=pk).update(finished_at=timezone.now() - timedelta(days=days))
    return pk


def left() -> set[int]:
    return set(Message.objects.values_list("pk", flat=True))


def prune(janitor: Janitor | None = None) -> set[int]:
    """Prune until nothing is left to do, and return the messages that stay."""
    janitor = janitor or Janitor("default", TUNING)
    while janitor.tick() != TUNING.prune_interval:
        pass
    return left()


# --- which time counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "stays"),
    [
        ({"mail.*": "1d", "pay.*": "7y", "": "30d"}, {"mail new", "pay", "other"}),
        # The first that matches counts, and the order of "" does not.
        ({"": "30d", "mail.news": "7y", "mail.*": "1d"}, {"mail new", "mail old", "other"}),
        # Without "" the default counts for the rest.
        ({"mail.*": "1d", "mail.news": "7y"}, {"mail new", "other"}),
        ({"queue=bulk": "1d", "": False}, {"mail new", "other", "pay"}),
        ({"queue=bu*": "1d", "mail.*": "100d", "": "5d"}, {"mail new", "other"}),
        ({"mail.*": False, "": "1h"}, {"mail new", "mail old"}),
        # Neither a sign of LIKE nor the case of letters is one of names.
        ({"MAIL.*": "1h", "m_il.*": "1h", "mail": "1h"}, {"mail new", "mail old", "other"}),
    ],
    ids=["prefixes", "first of two", "no rest", "queue", "queues", "never", "exact"],
)
def test_messages_are_kept_as_the_first_pattern_says(settings: Settings, kept: Any, stays: set[str]) -> None:
    settings.DELAYQ = {"RETENTION": kept}
    made = {
        "mail new": ended("mail.news", 0.5),
        "mail old": ended("mail.news", 20, "bulk"),
        "pay": ended("pay.charge", 40),
        "other": ended("other", 2),
    }
    assert prune() == {made[name] for name in stays}


def test_dead_messages_have_patterns_of_their_own(settings: Settings) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d"}, "DEAD_RETENTION": {"mail.*": "10d"}}
    ended("mail.news", 5)
    ended("mail.news", 11, state=State.DEAD)
    young, other = ended("mail.news", 5, state=State.DEAD), ended("pay", 80, state=State.DEAD)
    ended("pay", 91, state=State.DEAD)
    assert prune() == {young, other}


def test_a_message_that_was_requeued_is_kept_from_its_next_end_on(settings: Settings) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d"}}
    pk = ended("mail.news", 5)
    assert requeue_message(pk, delay="1h")
    assert prune() == {pk}
    assert cancel_message(pk)
    assert prune() == {pk}
    unguarded(Message).filter(pk=pk).update(finished_at=timezone.now() - timedelta(days=2))
    assert prune() == set()


def test_what_still_holds_its_key_is_found_when_it_does_not_any_more(settings: Settings) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d"}}
    pk = ended("mail.news", 5, key="5", unique="30d")
    janitor = Janitor("default", TUNING)
    assert prune(janitor) == {pk}
    unguarded(Message).filter(pk=pk).update(key_for=60)
    # It was passed over; all are looked at anew once a day, and by each new leader.
    assert prune(Janitor("default", TUNING)) == set()


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_many_that_ended_at_one_moment_are_all_found(settings: Settings) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d", "": False}}
    ids = [message.pk for message in schedule_messages({"topic": topic} for topic in ["mail.news", "pay"] * 10)]
    cancel_message(Message.objects.filter(pk__in=ids))
    unguarded(Message).update(finished_at=timezone.now() - timedelta(days=5))
    assert prune() == set(ids[1::2])


def test_what_is_kept_is_not_read_again_and_again(settings: Settings, count_spans: Callable[[], int]) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d", "": False}}
    for days in range(2, 14):
        ended("pay", days)
    janitor = Janitor("default", TUNING)
    prune(janitor)
    first = count_spans()
    prune(janitor)
    assert first > 3 * count_spans()


@pytest.fixture
def count_spans() -> Any:
    """Count the spans of time that were looked at since it was asked last."""
    with CaptureQueriesContext(connection) as seen:
        asked = [0]

        def count() -> int:
            new = [query for query in seen.captured_queries[asked[0] :] if "OFFSET 2" in query["sql"]]
            asked[0] = len(seen.captured_queries)
            return len(new)

        yield count


def test_a_process_that_ticks_once_comes_to_the_newest_of_each_name(settings: Settings) -> None:
    settings.DELAYQ = {"RETENTION": {"mail.*": "1d", "": False}}
    for _ in range(5):
        ended("pay", 300)
    old, new = ended("mail.news", 200), ended("mail.news", 2)
    tuning = UpkeepTuning(walked_together=1, prune_batch=1)
    Janitor("default", tuning).tick()
    assert new not in left()
    Janitor("default", tuning).tick()
    assert old not in left()
