"""Leases that ran out."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_delayq import transitions
from django_delayq.models import Message
from django_delayq.states import State
from django_delayq.worker.assembly import Parts
from tests.integration.claims import DB, claimed, state

pytestmark = pytest.mark.django_db(transaction=True)


def test_no_lease_is_reaped_before_its_holder_could_report_after_a_restart(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = claimed("t.ok")
    Message._base_manager.filter(pk=one.id).update(leased_until=transitions.now(DB) - timedelta(seconds=1))
    monkeypatch.setattr(transitions, "may_reap", lambda using: False)
    parts.reaper.tick()
    assert state(one) == State.RUNNING
    monkeypatch.setattr(transitions, "may_reap", lambda using: True)
    parts.reaper.tick()
    assert state(one) == State.SCHEDULED
