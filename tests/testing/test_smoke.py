from __future__ import annotations
import pytest
from collections.abc import Iterator
from django_delayq import schedule_message
from django_delayq.testing import Delayq

@pytest.fixture
def delayq() -> Iterator[Delayq]:
    with Delayq() as d:
        yield d

@pytest.mark.django_db
def test_a(delayq: Delayq) -> None:
    schedule_message("t.ok", {"a": 1}, delay="15m")
    schedule_message("t.tx", {"a": 1})
    assert [r.outcome for r in delayq.drain()] == ["consumed"]
    delayq.assert_scheduled("t.ok", due="15m", payload={"a": 1})
    assert [r.outcome for r in delayq.drain("2h")] == ["consumed"]
    schedule_message("t.second_time")
    with pytest.raises(RuntimeError):
        delayq.drain()
    print(delayq.drain("1m"))
    schedule_message("t.ok", {"a": 2}, delay="15m")
    delayq.assert_scheduled("t.ok", due="1m", payload__contains={"a": 1})
