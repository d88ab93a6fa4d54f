"""The shop's settings: its periods of time, and the address of the bank."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings

from django_delayq import RetryPolicy

CLOSE_AFTER = timedelta(minutes=15)
REMIND_AFTER = timedelta(minutes=10)
# Payment providers do the same: seven more tries over the rest of the day.
CALLBACK_RETRY = ("4m", "10m", "10m", "1h", "2h", "6h", "15h")
# The seconds that the bank has to answer.
CALLBACK_TIMEOUT = 5.0


def speed() -> float:
    """Return how many times faster than real time the shop runs: the demo cannot wait for 15 minutes."""
    return float(getattr(settings, "SHOP_SPEED", 1))


def close_after() -> timedelta:
    """Return the time for which an order may stay unpaid."""
    return CLOSE_AFTER / speed()


def remind_after() -> timedelta:
    """Return the time from the last change of an order to the reminder of its buyer."""
    return REMIND_AFTER / speed()


def callback_retry() -> RetryPolicy:
    """Return the retry policy for calls that the bank did not answer."""
    return RetryPolicy.fixed([wait / speed() for wait in RetryPolicy.fixed(CALLBACK_RETRY).delays])


def callback_url() -> str:
    """Return the URL to which the bank wants payments reported."""
    return str(getattr(settings, "SHOP_CALLBACK_URL", "http://127.0.0.1:8000/bank/"))
