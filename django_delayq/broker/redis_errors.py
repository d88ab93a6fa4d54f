"""Turns what Redis says, or does not say, into the exceptions of a broker."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import redis
from django.db import Error as DatabaseError

from ..core.exceptions import BrokerFull, BrokerRubbish, BrokerUnavailable, ClusterBroker, DelayqError

# The answers by which a Redis in cluster mode refuses keys.
CLUSTER_ERRORS = (
    redis.exceptions.MovedError,
    redis.exceptions.AskError,
    redis.exceptions.ClusterCrossSlotError,
    redis.exceptions.ClusterDownError,
)
# How they begin, for older releases of redis-py, which know these errors in a client of a cluster only.
CLUSTER_WORDS = ("MOVED ", "ASK ", "CROSSSLOT ", "CLUSTERDOWN ")
# What Redis says when a key, a score or a field is not what this package writes there.
NOT_OURS = re.compile("WRONGTYPE|not an integer|not a valid float|overflow|attempt to")

# Errors that stay what they are. Some calls read the identity of the database, which may not answer.
OURS = (DelayqError, DatabaseError)

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn every error of Redis, its client and its answers into ``BrokerUnavailable`` or a kind of it.

    An answer that is not what it should be raises anything: a server need not be Redis, and people write into keys.
    """
    try:
        yield
    except OURS:
        raise
    except Exception as error:
        raise _translate(error) from error


def translated(method: Callable[P, R]) -> Callable[P, R]:
    """Have a method raise as ``translated_errors`` does; a context for each call would take longer."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except OURS:
            raise
        except Exception as error:
            raise _translate(error) from error

    return call


def _translate(error: Exception) -> BrokerUnavailable:
    if isinstance(error, CLUSTER_ERRORS) or str(error).startswith(CLUSTER_WORDS):
        return ClusterBroker()
    kind: type[BrokerUnavailable] = BrokerUnavailable
    if "used memory > 'maxmemory'" in str(error):
        kind = BrokerFull
    elif NOT_OURS.search(str(error)) or not isinstance(error, redis.RedisError | OSError):
        kind = BrokerRubbish
    return kind(f"{type(error).__name__}: {error}")
