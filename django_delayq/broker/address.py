"""Where the Redis of the settings is, in words, and whether a connection to it is possible.

To import redis-py takes longer than many a command does. So redis-py reads only addresses that are no plain URLs.
It is imported as a whole: its modules import each other in a circle, and a thread that asks for one of them does not
wait for another thread that imports the package.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from django.core.cache import InvalidCacheBackendError

from ..project.conf import Settings, forget_on_change
from .nodes import as_text, nodes_in

# What redis-py is known to take: a host, perhaps with a user, a port and the number of a database.
_PLAIN = re.compile(
    r"redis://(?:[\w.~-]*(?::[\w.~-]*)?@)?[\w-]{1,63}(?:\.[\w-]{1,63})*(?::([0-9]{1,5}))?(?:/[0-9]{0,4})?",
    re.ASCII,
)


def problem(settings: Settings) -> str:
    """Return in one sentence why no connection to the Redis of the settings is possible; "" if one is."""
    assert settings.REDIS is not None
    if find_spec("redis") is None:
        return "The package redis is not installed: install it, or write None, and messages are delivered by query."
    plain = _PLAIN.fullmatch(settings.REDIS)
    if plain and 0 < int(plain[1] or 1) < 65_536:
        return ""
    return _asked(settings.REDIS)


@lru_cache(maxsize=1)
def _asked(address: str) -> str:
    """Have redis-py read the URL or the alias and make a connection, which does not connect.

    The sentence shows no password. A worker asks before its processes are forked: each would need memory for it.
    """
    import redis

    from .connection import connect

    try:
        if "://" in address and (found := _problem_of_url(address)):
            return found
        pool = connect(address, timeout=1.0).connection_pool
        connection: Any = pool.make_connection()
        if isinstance(pool, redis.sentinel.SentinelConnectionPool) or not hasattr(connection, "host"):
            return ""
        # As socket.getaddrinfo() does it.
        str(connection.host).encode("idna")
    except UnicodeError:
        return "The name of the host is impossible: each of its parts has 1 to 63 characters."
    except InvalidCacheBackendError:
        return f"CACHES has no alias {address!r} with a cache that can be imported."
    except NotImplementedError:
        return (
            f"The cache alias {address!r} is none of django-redis with one Redis behind it: its BACKEND is "
            "django_redis.cache.RedisCache, and no ShardClient."
        )
    except redis.exceptions.RedisClusterException:
        return (
            f"The cache alias {address!r} has a client of a Redis Cluster, which leads to them by itself: write the "
            "nodes here instead, as in redis+cluster://host:port,host:port."
        )
    except Exception as error:  # noqa: BLE001
        unknown = re.search(r"unexpected keyword argument ('\w+')", str(error))
        if unknown:
            return f"redis-py has no option {unknown[1]} for a connection."
        text = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        who = "redis-py" if "://" in address else "django-redis"
        return f"{who} refuses it: {type(error).__name__}: {text}."
    return ""


forget_on_change(_asked, "CACHES")


def _problem_of_url(url: str) -> str:
    """Return in one sentence why nothing can connect to a URL; "" when it is right. Shows no part of a password."""
    import redis

    try:
        if (found := nodes_in(url)) is not None:
            url, nodes = found
            for host, _port in nodes:
                # As socket.getaddrinfo() does it.
                host.encode("idna")
        given = redis.connection.parse_url(url)
        port = urlsplit(url).port
    except UnicodeError:
        raise
    except ValueError as error:
        if str(error).startswith("Invalid value for '"):
            return f"redis-py refuses it: {error}"
        # The text of the error may hold a part of a password.
        return (
            "The URL cannot be read: it begins with redis://, rediss:// or unix://, or with redis+cluster:// or "
            "rediss+cluster:// and the nodes of a cluster; a port is a number from 1 to 65535, and in a user name or "
            "password characters such as / : @ , # ? are percent-encoded."
        )
    if port == 0:
        return "The port is a number from 1 to 65535."
    path = urlsplit(url).path.strip("/")
    if url.startswith("unix:") and "path" not in given:
        return "A unix:// URL has the path of a socket, as in unix:///run/redis.sock."
    if "path" not in given and path and not path.isdigit():
        return "The path of the URL is the number of a database, as in redis://localhost:6379/0."
    return "The number of the database is 0 or more." if given.get("db", 0) < 0 else ""


def describe(settings: Settings) -> str:
    """Return where Redis is, for people to read: without user names and passwords."""
    if settings.REDIS is None:
        return "none (delivery by query)"
    if "://" not in settings.REDIS:
        return f"cache alias {settings.REDIS!r}"
    import redis

    with contextlib.suppress(ValueError):
        if (found := nodes_in(settings.REDIS)) is not None:
            return f"Redis Cluster {', '.join(map(as_text, found[1]))}"
        parts = redis.connection.parse_url(settings.REDIS)
        if "path" in parts:
            return f"unix:{parts['path']} db {parts.get('db', 0)}"
        return f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)} db {parts.get('db', 0)}"
    return "an URL"
