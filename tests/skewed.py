"""A Redis server whose clock a test sets, by libfaketime (``pip install libfaketime``, or a package of the system)."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import redis

from testproject.servers import RedisServer

OF_THE_SYSTEM = [
    *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    *Path("/usr/lib").glob("faketime/libfaketime.so.1"),
    *Path("/usr/local/lib").glob("faketime/libfaketime.so.1"),
]


def find_libfaketime() -> Path | None:
    """Return the library that sets a process's clock, from the Python package or from the system."""
    package = importlib.util.find_spec("libfaketime")
    places = [] if package is None else [Path(place) for place in package.submodule_search_locations or ()]
    found = [path for place in places for path in place.glob("**/libfaketime.so.1")]
    return next(iter([*found, *OF_THE_SYSTEM]), None)


class SkewedRedis(RedisServer):
    """A Redis with a clock of its own."""

    def __init__(self, *arguments: str) -> None:
        library = find_libfaketime()
        if library is None:
            pytest.skip("needs libfaketime: pip install libfaketime")
        self._library = library
        super().__init__(*arguments)

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    @property
    def _offset(self) -> Path:
        return self.directory / "offset"

    def start(self) -> None:
        """Start the server with the right time, unless it was set before."""
        if not self._offset.exists():
            self._offset.write_text("+0\n")
        super().start()

    def set_ahead_at_start(self, seconds: float) -> None:
        """Set the clock so many seconds ahead (negative: behind), whether the server runs or not."""
        written = self.directory / "offset.new"
        written.write_text(f"{seconds:+f}\n")
        written.chmod(0o644)
        written.rename(self._offset)

    def set_ahead(self, seconds: float) -> None:
        """Set the clock of the running server so many seconds ahead (negative: behind)."""
        self.set_ahead_at_start(seconds)
        with redis.Redis(port=self.port) as client:
            now, _micros = client.time()
        if abs(now - time.time() - seconds) > 10:
            pytest.skip(f"{self._library} has no effect on this Redis")
