"""A Redis server whose clock a test sets, by libfaketime (``pip install libfaketime``, or a package of the system)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
import redis

from testproject.servers import RedisServer, find_redis
from tests.support.workers import PATIENCE

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


def preloaded(library: Path) -> str:
    """Return what LD_PRELOAD has to be, so that a Redis gets its clock from the library.

    Debian's Redis takes its memory from jemalloc, which asks for the time before it gives any. The library needs memory
    before it can tell the time: Redis would wait for ever. With the C library's memory it starts.
    """
    return f"{library} libc.so.6"


@cache
def why_no_clock_can_be_set() -> str | None:
    """Return what keeps tests from setting the clock of the Redis that they start; None when they can."""
    library, program = find_libfaketime(), find_redis()
    if library is None:
        return "libfaketime was not found (pip install libfaketime)"
    if program is not None and not _starts(program, library):
        return f"{program} does not start with {library}; DELAYQ_REDIS_SERVER may name another Redis"
    return None


def _starts(program: Path, library: Path) -> bool:
    environment = {**os.environ, "LD_PRELOAD": preloaded(library), "FAKETIME": "+1h"}
    try:
        subprocess.run([program, "--version"], env=environment, capture_output=True, timeout=PATIENCE, check=True)
    except subprocess.SubprocessError:
        return False
    return True


class SkewedRedis(RedisServer):
    """A Redis with a clock of its own."""

    def __init__(self, *arguments: str) -> None:
        if reason := why_no_clock_can_be_set():
            pytest.skip(reason)
        super().__init__(*arguments)

    def _environment(self) -> dict[str, str]:
        library = find_libfaketime()
        assert library is not None
        return {
            **super()._environment(),
            "LD_PRELOAD": preloaded(library),
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
            pytest.skip("libfaketime has no effect on this Redis")
