"""Makes tokens, and lets in those who have one. A token has 160 random bits: nobody finds it by its plain digest."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from django.db import Error as DatabaseError
from django.db import router, transaction
from django.utils import timezone

from .. import signals
from ..models import Message
from ..record.sql.sessions import lock_timeout, own_transaction
from . import models
from .exchange import RequestRefused, refuse_if
from .models import Token

RIGHTS = tuple(models.RIGHTS)
# The greatest number of a limit: an integer of the database holds no more.
MOST_CALLS = 2**31 - 1
# Each process reads a token again after this time: then a change of it holds in all processes. Seconds.
KNOWN_FOR = 1.0
MOST_KNOWN = 1000
# That a token is used is written when it was not written for this time.
USE_WRITTEN_EVERY = timedelta(minutes=5)
# It is written later when it would wait for a lock for longer than this. Milliseconds.
USE_LOCK_TIMEOUT = 50


# By digest: the tokens that this process has found, and until when it need not read them again (monotonic).
_known: dict[str, tuple[Token, float]] = {}
# The digests of the tokens whose use is to be written.
used: set[str] = set()


def digest_of(text: str) -> str:
    """Return the digest of a token, which is all that is kept of it."""
    return hashlib.sha256(text.encode()).hexdigest()


def make(
    namespace: str, rights: Collection[str] = RIGHTS, *, lasts: timedelta | None = None, description: str = ""
) -> tuple[Token, str]:
    """Make a token of a namespace. Return its row, and the token itself, which nobody can read again."""
    token = Token(
        namespace=namespace,
        rights=",".join(right for right in RIGHTS if right in rights),
        description=description,
        expires_at=None if lasts is None else timezone.now() + lasts,
    )
    return token, issue(token)


def issue(token: Token) -> str:
    """Save a new token. Return the token itself."""
    text = secrets.token_hex(20)
    token.digest, token.beginning = digest_of(text), text[:8]
    with _audited("token add", token):
        token.save(force_insert=True)
    return text


def limit(token: Token, reads: int | None, writes: int | None, interval: int | None) -> None:
    """Change how many calls a token may make in an interval (seconds). The change holds within a second."""
    token.reads, token.writes, token.interval = reads, writes, interval
    with _audited("token limit", token):
        token.save(update_fields=["reads", "writes", "interval"])


def delete(token: Token) -> None:
    """Let nobody in by a token any more."""
    with _audited("token delete", token):
        token.delete()


@contextmanager
def _audited(action: str, token: Token) -> Iterator[None]:
    """Return a context in which a token is changed, and the audit told of it, or neither."""
    with transaction.atomic(using=router.db_for_write(Token)):
        yield
        _known.clear()
        # The audit is where messages are; a router may keep tokens elsewhere.
        signals.emit_action(Token, router.db_for_write(Message), action, str(token), reason=token.description)


def _find(digest: str) -> Token | None:
    known = _known.get(digest)
    if known is not None and time.monotonic() < known[1]:
        return known[0]
    # A replica may not know yet that a token was deleted.
    token = Token.objects.using(router.db_for_write(Token)).filter(digest=digest).first()
    if token is not None:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[digest] = token, time.monotonic() + KNOWN_FOR
        if token.used_at is None or token.used_at < timezone.now() - USE_WRITTEN_EVERY:
            used.add(digest)
    return token


def check(namespace: str, given: str, right: str) -> Token:
    """Return the token of a request. Raises ``RequestRefused``."""
    pool, colon, text = given.rpartition(":")
    refuse_if(bool(colon) and pool != "default", "pool not found", 404)
    refuse_if(not text, "token not found", 401)
    digest = digest_of(text)
    token = _find(digest)
    if token is None or token.namespace != namespace or not hmac.compare_digest(token.digest, digest):
        raise RequestRefused(401, "invalid token")
    refuse_if(token.expires_at is not None and token.expires_at <= timezone.now(), "invalid token", 401)
    refuse_if(not token.may(right), f"the token has no right to {right}", 403)
    return token


def write_uses() -> None:
    """Write which tokens are used. No answer waits for this, or fails with it: what fails now is written later."""
    digests = tuple(used)
    if digests:
        used.difference_update(digests)
        using = router.db_for_write(Token)
        with suppress(DatabaseError), lock_timeout(USE_LOCK_TIMEOUT), own_transaction(using):
            Token.objects.using(using).filter(digest__in=digests).update(used_at=timezone.now())
