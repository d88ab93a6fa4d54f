from __future__ import annotations

from django_delayq.core.outages import Outage

CLOSED, REFUSED = OSError("server closed the connection"), OSError("FATAL: password of user 'shop' refused")


def test_the_first_error_and_each_that_takes_its_place_are_news() -> None:
    outage = Outage()
    errors = [CLOSED, CLOSED, REFUSED, OSError("FATAL: password of user 'web' refused"), ValueError(str(REFUSED))]
    assert [outage.is_news(error) for error in errors] == [True, False, True, False, True]
    assert outage.end()
    assert not outage.end()
    assert outage.is_news(CLOSED)


def test_errors_that_take_turns_are_told_once_a_minute() -> None:
    outage = Outage()
    assert [outage.is_news(error) for error in [CLOSED, REFUSED] * 5] == [True, True] + [False] * 8
    outage = Outage(told_again_after=0.0)
    assert [outage.is_news(error) for error in [CLOSED, CLOSED, REFUSED]] == [True, False, True]
