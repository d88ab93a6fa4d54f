"""Takes Redis away in tests. It imports little: the plugin of pytest uses it in every project."""

from __future__ import annotations

from ..broker import publisher
from ..project import conf


def use_no_redis(in_tests: bool) -> None:
    """Take away Redis from the whole package, or give it back. What is remembered of the settings is forgotten."""
    if conf.in_tests != in_tests:
        conf.in_tests = in_tests
        conf.get.cache_clear()
        publisher.get.cache_clear()
