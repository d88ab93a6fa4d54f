"""How long things take in the shop, and where the bank listens."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings

from django_delayq import RetryPolicy

CLOSE_AFTER = timedelta(minutes=15)
REMIND_AFTER = timedelta(minutes=10)
# What payment providers do: seven more tries over the rest of the day.
CALLBACK_RETRY = ("4m", "10m", "10m", "1h", "2h", "6h", "15h")
# Seconds that the bank may take to answer.
CALLBACK_TIMEOUT = 5.0


def speed() -> float:
    """How many times faster than in life the shop runs; the demo has no quarter of an hour to spare."""
    return float(getattr(settings, "SHOP_SPEED", 1))


def close_after() -> timedelta:
    """How long an order may stay unpaid."""
    return CLOSE_AFTER / speed()


def remind_after() -> timedelta:
    """How long an order must be left alone before its buyer is reminded of it."""
    return REMIND_AFTER / speed()


def callback_retry() -> RetryPolicy:
    """When the bank is called again after it did not answer."""
    return RetryPolicy.fixed([wait / speed() for wait in RetryPolicy.fixed(CALLBACK_RETRY).delays])


def callback_url() -> str:
    """Where the bank wants to hear of payments."""
    return str(getattr(settings, "SHOP_CALLBACK_URL", "http://127.0.0.1:8000/bank/"))
