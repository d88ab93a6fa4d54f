"""Requests and their answers: they are the same under each kind of server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from . import jobs

# The greatest length of the body of a request. Bytes.
LARGEST_BODY = 1_048_576
JSON, METRICS = "application/json; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"
# Python reads no number with more digits.
DIGITS = re.compile("[0-9]{1,4000}", re.ASCII)
# The names of namespaces and queues.
NAME = re.compile(r"[-_A-Za-z0-9]+")
LONGEST_NAME = 255
# Each answer is for one client: neither Django's cache of a whole site nor a proxy keeps it.
UNCACHED = "private, no-store"
# The characters that Go escapes in JSON, and how.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``path``: its address without the prefix of the door. The names of headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def token(self) -> str:
        """The token in the headers or the query of the request."""
        return self.headers.get("x-token") or self.query.get("token", "")


class Reply(NamedTuple):
    """An answer: bytes are metrics, None is nothing, and anything else becomes JSON."""

    status: int
    content: Any = None
    headers: Mapping[str, str] = MappingProxyType({})

    def written(self) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body of the answer, as lmstfy writes them."""
        headers, body = {"X-Request-Id": jobs.request_id(), "Cache-Control": UNCACHED, **self.headers}, self.content
        if body is None:
            return headers, b""
        headers["Content-Type"] = METRICS if isinstance(body, bytes) else JSON
        if not isinstance(body, bytes):
            text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            body = text.translate(_ESCAPED).encode()
        headers["Content-Length"] = str(len(body))
        return headers, body


class RequestRefused(Exception):
    """A request is refused. The answer has this status and this error."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.answer = Reply(status, {"error": error})


def refuse_if(is_wrong: bool, error: str, status: int = 400) -> None:
    """Raise ``RequestRefused`` for a request in which something is wrong."""
    if is_wrong:
        raise RequestRefused(status, error)
