"""What a handler may raise."""

from __future__ import annotations

import pytest

from django_delayq import RetryLater
from django_delayq.core.durations import Duration


@pytest.mark.parametrize("delay", [-1, 1e15, "99999999999d", "soon"])
def test_an_impossible_delay_is_a_value_error(delay: Duration) -> None:
    with pytest.raises(ValueError, match=r"RetryLater needs a delay of 0 seconds to 100 years|not a duration"):
        RetryLater(delay)
