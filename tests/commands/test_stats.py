from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_delayq import cancel_message, transitions
from django_delayq.inspector import stats
from django_delayq.models import Message, Transition
from django_delayq.sql.rows import Success
from django_delayq.states import State
from testproject.servers import RedisServer

from .conftest import claim, run, schedule

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_counts_what_is_where() -> None:
    schedule(3)
    schedule(2, due=-100, queue="slow")
    claim(*schedule(1, due=-1))
    transitions.give_up("default", schedule(2), reason="", actor="")
    cancel_message(schedule(1)[0])
    run("delayq_restore")

    found = run("delayq_stats", "--json").json

    assert {name: number["count"] for name, number in found["states"].items() if number["count"]} == {
        "scheduled": 5,
        "running": 1,
        "dead": 2,
        "cancelled": 1,
    }
    assert all(number["exact"] for number in found["states"].values())
    assert found["overdue"]["count"] == 2
    assert found["oldest_overdue"] < found["at"] < found["next_due"]
    assert (found["queues"]["default"]["delayed"], found["queues"]["slow"]["ready"]) == (3, 2)
    assert found["queues"]["default"]["horizon"] > found["at"]
    assert found["redis"]["reachable"] is True
    assert found["redis"]["maxmemory_policy"] == "noeviction"


def test_finished_messages_are_not_counted_past_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    transitions.give_up("default", schedule(5), reason="", actor="")
    monkeypatch.setattr(stats, "FINISHED_CAP", 3)
    found = run("delayq_stats", "--json").json
    assert found["states"]["dead"] == {"count": 3, "exact": False}
    assert "3+" in run("delayq_stats").out


def test_lateness_is_from_the_due_time_to_the_first_claim() -> None:
    ids = schedule(20, due=-10)
    claim(*ids)
    transitions.succeed("default", [Success(pk, 1, "") for pk in ids])
    for place, pk in enumerate(ids):
        first = Transition.objects.filter(message_id=pk, to_state=State.RUNNING)
        due = Message.objects.get(pk=pk).due_at
        first.update(at=due + timedelta(seconds=place + 1))
        # A later delivery of the same message does not count.
        Transition.objects.create(
            message_id=pk, number=9, at=due + timedelta(hours=1), from_state="scheduled", to_state="running", due_at=due
        )

    found = run("delayq_stats", "--json").json["lateness"]

    assert found == {"of": 20, "p50": 10.0, "p95": 19.0}


def test_it_works_while_redis_is_away(redis_server: RedisServer) -> None:
    schedule(3)
    redis_server.kill()
    ran = run("delayq_stats", "--json")
    assert ran.code == 0
    assert ran.json["redis"]["reachable"] is False
    assert ran.json["states"]["scheduled"]["count"] == 3
    assert ran.json["queues"]["default"]["delayed"] is None
    assert "does not answer" in run("delayq_stats").out


def test_it_tells_no_secrets(settings: Any, redis_server: RedisServer) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": f"redis://anna:hunter2@127.0.0.1:{redis_server.port}/0"}
    for words in ([], ["--json"]):
        ran = run("delayq_stats", *words)
        assert "hunter2" not in ran.out + ran.err
        assert f"127.0.0.1:{redis_server.port}" in ran.out


def test_an_empty_record_is_no_trouble() -> None:
    ran = run("delayq_stats")
    assert ran.code == 0
    assert "nothing was delivered yet" in ran.out
    assert timezone.now().isoformat()[:10] in run("delayq_stats", "--json").out
