"""The names under which ids are blocked in Redis: digests, so that no topic and no limit key is known there.

``h`` and the digest of a topic: it has no handler in some process, or no free slot. ``t`` and that digest: the
limit of the topic is full; with the digest of a limit key behind it, the limit of that key. Queues keep their names.

The digest of a limit key, which is often a customer, is made with ``SECRET_KEY``: nobody can find it by trying all
customers. That of a topic is made without it, because each process has to recognize the topics that it serves, and
projects with other secrets may share a queue. A key need not be recognized: a process tries what it does not know, and
blocks it again under the name that it knows. So nothing is lost when the secret changes.

Processes of version 0.9.0 use names in clear. Like this version, they try each name of an unknown kind.
"""

from __future__ import annotations

import hashlib
import secrets

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.crypto import salted_hmac

from ...core import limits

# Ids without a handler or a slot are blocked under this word and their topic.
HANDLER = "handler "
SALT = "django_delayq.limit_key"
# The secret of a project without SECRET_KEY: the processes of one worker share it.
OWN_SECRET = secrets.token_hex()


def digest(topic: str) -> str:
    """Return the digest of a topic."""
    return hashlib.blake2b(topic.encode(), digest_size=8).hexdigest()


def names_in_redis(name: str) -> list[str]:
    """Return the name in Redis under which ids are blocked, then those that it had with ``SECRET_KEY_FALLBACKS``."""
    kind, what, key = limits.parts(name)
    if kind == "queue":
        return [name]
    begin = f"{kind[0]} {digest(what)}"
    if key is None:
        return [begin]
    value = f"{what} {key}"
    return [
        f"{begin} {salted_hmac(SALT, value, secret=secret, algorithm='sha256').hexdigest()[:16]}"
        for secret in _secrets()
    ]


def _secrets() -> list[str | bytes]:
    try:
        return [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    except ImproperlyConfigured:
        return [OWN_SECRET]
