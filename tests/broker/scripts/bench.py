"""A queue in a real Redis: the places of its ids before and after a call. The test sets the time as a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis

from django_delayq.broker import scripts
from django_delayq.broker.keys import Keys, keys

NOW = 18_000_000_000_000
BAND = 2**45
RANKS = 256


@dataclass(frozen=True)
class Delayed:
    due: int
    rank: int = 100


@dataclass(frozen=True)
class Ready:
    since: int
    rank: int = 100


Place = Delayed | Ready
Places = dict[int, Place]


@dataclass
class Bench:
    """Calls the scripts on the keys of one queue."""

    client: redis.Redis
    keys: Keys = field(default_factory=lambda: keys("bench", "q"))

    def set(self, places: Places, *, horizon: int | None = None) -> None:
        """Lay out the queue by hand."""
        for number, place in places.items():
            if isinstance(place, Delayed):
                self.client.zadd(self.keys.delayed, {str(number): place.due + place.rank / RANKS})
            else:
                self.client.zadd(self.keys.ready, {str(number): place.rank * BAND + place.since})
        if horizon is not None:
            self.client.hset(self.keys.meta, "horizon", horizon)

    def places(self) -> Places:
        """Return where every id is; an id in both sets is an error."""
        found: Places = {}
        for number, score in self._scores(self.keys.delayed):
            found[number] = Delayed(int(score), round(score % 1 * RANKS))
        for number, score in self._scores(self.keys.ready):
            assert number not in found, f"{number} is in both sets"
            found[number] = Ready(int(score) % BAND, int(score) // BAND)
        return found

    def _scores(self, key: str) -> list[tuple[int, float]]:
        members: Any = self.client.zrange(key, 0, -1, withscores=True)
        return [(int(member), float(score)) for member, score in members]

    def meta(self) -> dict[str, str]:
        fields: Any = self.client.hgetall(self.keys.meta)
        return {name.decode(): value.decode() for name, value in fields.items()}

    def tokens(self) -> int:
        """Return how many tokens are in the wake list."""
        return int(self.client.llen(self.keys.wake))

    def call(self, name: str, *, rest: Any = (), **values: Any) -> Any:
        """Call a script on the queue."""
        script = scripts.load(name)
        if "identity" in script.arguments:
            # Most tests do not mind whose queue it is.
            values.setdefault("identity", "")
        return plain(script(self.client, self.keys, rest, **values))

    def put(self, *entries: tuple[int, int, int], mode: str = "set", now: int = NOW) -> Any:
        """Put entries of id, due, rank."""
        return self.call("put", now=now, mode=mode, rest=[number for entry in entries for number in entry])

    def take(
        self,
        limit: int,
        *opened: tuple[str, int],
        now: int = NOW,
        batch: int = 1000,
        within: int = 0,
        both_ends: bool = False,
    ) -> tuple[int, int, int | None, list[int]]:
        """Take; returns how many moved, how many are left, in how many tenths the next is due, and the ids taken.

        ``opened``: the names of limits that have room again, and for how many.
        """
        terms = {"now": now, "limit": limit, "batch": batch, "within": within, "both_ends": int(both_ends)}
        answer = self.call("take", rest=[value for name in opened for value in name], **terms)
        moved, left, next_due, _other, _any_blocked, *taken = answer
        return moved, left, int(next_due) - now if next_due else None, [int(number) for number in taken[::2]]


def plain(answer: Any) -> Any:
    """Turn the bytes of an answer into text."""
    if isinstance(answer, bytes):
        return answer.decode()
    return [plain(item) for item in answer] if isinstance(answer, list) else answer
