"""Takes Redis away in tests. It imports little: the plugin of pytest uses it in every project."""

from __future__ import annotations

from ..broker import publisher
from ..core import in_tests
from ..project import conf


def use_no_redis(taken_away: bool) -> None:
    """Take away Redis from the whole package, or give it back. The settings that were remembered are forgotten."""
    if in_tests.without_redis != taken_away:
        in_tests.without_redis = taken_away
        conf.get.cache_clear()
        publisher.get.cache_clear()
