"""How a job of lmstfy's wire is kept here: its queue, its id, its body and its attributes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ..core.bounds import LENGTHS
from ..core.exceptions import InvalidMessage
from ..models import Message
from ..project import http_conf, pulled, registry, validation

# Separates a namespace and a queue, neither of which can hold it.
SEPARATOR = "."
# The names that queues keep here as they are: not those of the digests of other namespaces.
_PLAIN = re.compile(r"(?!http\.[0-9a-f]{30}\Z)[A-Za-z0-9][A-Za-z0-9_.-]*")
# The alphabet of job ids: that of ULIDs, which the clients know.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
# The digits of Python for the same numbers.
_TO_BASE_32 = str.maketrans(_ALPHABET, "0123456789ABCDEFGHIJKLMNOPQRSTUV")
_JOB_ID = re.compile(f"1?([{_ALPHABET}]{{26}})")
# The header of a message in which the rest of a job stands.
HEADER = "http"
# A JSON body of up to this size comes back with its own white space. Characters.
EXACT_UP_TO = 8_000


def queue_of(namespace: str, queue: str) -> str:
    """Return the queue here for a queue of a namespace. Long and unusual names become digests."""
    name = f"{namespace}{SEPARATOR}{queue}"
    if len(name) <= LENGTHS.queue and _PLAIN.fullmatch(name):
        return name
    plain = namespace if len(namespace) < LENGTHS.queue // 2 and _PLAIN.fullmatch(namespace) else "http"
    return f"{plain}{SEPARATOR}{hashlib.blake2b(name.encode(), digest_size=15).hexdigest()}"


def topic_of(queue: str) -> str:
    """Return the topic of the messages of a queue."""
    return http_conf.get().TOPICS.get(queue, queue)


def has_receiver(queue: str) -> bool:
    """Return whether anybody receives the messages of a queue: programs that pull, or a handler."""
    return pulled.terms(queue) is not None or registry.find(topic_of(queue)) is not None


# --- bodies -----------------------------------------------------------------------------------------------------------


def stored(body: bytes, attributes: Mapping[str, str] | None) -> tuple[Any, str, dict[str, Any]]:
    """Return how a message keeps a body: its payload as a value and as JSON, and its headers.

    A body that is JSON is the payload; any other bytes stand in it.
    """
    kept: dict[str, Any] = {"at": int(time.time() * 1000)}
    if attributes is not None:
        kept["attributes"] = attributes
    try:
        # Bytes that are not UTF-8 stay bytes: json.loads would guess another encoding.
        text = body.decode()
        value = json.loads(text)
        payload = validation.payload_of_any_size(value)
    except (ValueError, RecursionError, InvalidMessage):
        kept["bytes"] = True
        value = {"base64": base64.b64encode(body).decode()}
        payload = json.dumps(value)
    else:
        if len(json.dumps(text)) <= EXACT_UP_TO:
            kept["body"] = text
    return value, payload, {HEADER: kept}


def _kept(headers: Any) -> Mapping[str, Any]:
    """Return what this door keeps in the headers of a message, in which others may write anything."""
    found = headers.get(HEADER) if isinstance(headers, dict) else None
    return found if isinstance(found, dict) else {}


def body_of(payload: Any, headers: Mapping[str, Any]) -> bytes:
    """Return the body of a message. If this door has not written it, the body is the payload as JSON."""
    kept = _kept(headers)
    if kept.get("bytes"):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return base64.b64decode(payload["base64"])
    if "body" in kept:
        return str(kept["body"]).encode()
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()


def attributes_of(headers: Mapping[str, Any]) -> Any:
    """Return the attributes of a message; None: it has none."""
    return _kept(headers).get("attributes") or None


# --- ids --------------------------------------------------------------------------------------------------------------


def _text(number: int) -> str:
    """Return a number of up to 130 bits as a ULID writes it."""
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])


def published_at(headers: Mapping[str, Any], created_at: datetime | None = None) -> int:
    """Return when a job was published (ms, Unix time): from the note of this door, else from the row of the message."""
    noted = _kept(headers).get("at")
    if isinstance(noted, int) and noted > 0:
        return noted
    return 0 if created_at is None else int(created_at.timestamp() * 1000)


def job_id(message_id: int, published_at: int, headers: Mapping[str, Any]) -> str:
    """Return the id of a job: a ULID of the time of its publish and the number of its message."""
    version = "1" if "attributes" in _kept(headers) else ""
    return version + _text(published_at << 80 | message_id)


def id_of(message: Message) -> str:
    """Return the id of the job for which a message stands."""
    return job_id(message.pk, published_at(message.headers, message.created_at), message.headers)


def message_id(job: str) -> int | None:
    """Return the number of the message of a job; None for a text that is no id."""
    found = _JOB_ID.fullmatch(job)
    return None if found is None else int(found[1].translate(_TO_BASE_32), 32) & 2**63 - 1


def request_id() -> str:
    """Return a new id for a request."""
    return _text(int(time.time() * 1000) << 80 | secrets.randbits(80))
