"""Counts the calls of tokens that have limits: with Redis those of all processes, without it those of this process."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from django.db import router

from ..broker import publisher
from ..broker.base import CallCount
from ..models import Message
from .exchange import Reply, RequestRefused
from .models import Token

# lmstfy's words for calls that take jobs, and for calls that publish jobs.
CONSUME, PRODUCE = "consume", "produce"


class RateLimited(RequestRefused):
    """A call above the limit of its token, in the words of lmstfy."""

    def __init__(self, given: str, verb: str, left_ms: int) -> None:
        super().__init__(429, f"token({given}) {verb} reach the limit rate, please retry later")
        self.answer = Reply(429, {"msg": str(self)}, {"Retry-After": str(max(1, ceil(left_ms / 1000)))})


@dataclass(slots=True)
class _Window:
    name: str
    # Monotonic, seconds.
    ends: float
    count: int = 0


class ProcessCounts:
    """The windows of this process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}

    def count_call(self, name: str, window: str, step: int, most: int, interval_ms: int) -> CallCount:
        """Count a call, or take one back, as ``RedisBroker.count_call`` does."""
        now = time.monotonic()
        ends = now + interval_ms / 1000
        with self._lock:
            found = self._windows.get(name)
            if step < 0:
                if found is not None and found.name == window:
                    found.count += step
                return CallCount(window, 0)
            if found is None or found.ends <= now:
                self._windows = {name: each for name, each in self._windows.items() if each.ends > now}
                found = self._windows[name] = _Window(window, ends)
            found.ends = min(found.ends, ends)
            has_room = found.count < most
            found.count += has_room
            return CallCount(found.name if has_room else "", ceil((found.ends - now) * 1000))


_process_counts = ProcessCounts()


class Counted(NamedTuple):
    """A call that was counted: by whom, under which name, and in which window."""

    counts: publisher.Publisher | ProcessCounts
    name: str
    window: str

    def take_back(self) -> None:
        """Count the call no longer: it had no effect."""
        self.counts.count_call(self.name, self.window, -1, 0, 0)


def count(token: Token, verb: str, given: str) -> Counted | None:
    """Count a call; None: its token has no limit for it. Raises ``RateLimited``."""
    most = token.reads if verb == CONSUME else token.writes
    if most is None or token.interval is None:
        return None
    name, window = f"{token.digest}:{verb}", secrets.token_hex(8)
    call = (name, window, 1, most, token.interval * 1000)
    counts: publisher.Publisher | ProcessCounts = publisher.get(router.db_for_write(Message)) or _process_counts
    answer = counts.count_call(*call)
    if answer is None:
        # Redis does not answer.
        counts, answer = _process_counts, _process_counts.count_call(*call)
    if not answer.window:
        raise RateLimited(given, verb, answer.left_ms)
    return Counted(counts, name, answer.window)
