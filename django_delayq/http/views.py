"""Answers requests of lmstfy's wire."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connections, router, transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from .. import __version__, extensions
from ..core import once
from ..models import Message
from ..record.sql import statements
from . import calls, jobs, tokens
from .tokens import refuse_if

logger = logging.getLogger("django_delayq")

P = ParamSpec("P")
T = TypeVar("T")
View = Callable[..., HttpResponse]
# A request that was let in, and its response. A poll that waits has no response yet.
Attempt = tuple[calls.Call | None, HttpResponse | None]

LONGEST_NAME = 255
_NAME = re.compile(r"[-_A-Za-z0-9]+")
# The characters that Go escapes in JSON, and how.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
# The views of the door.
DOOR: set[View] = set()


def _door(view: View) -> View:
    """Let a view answer without a cookie, a login and a transaction around it."""
    door: View = login_not_required(csrf_exempt(view))
    for alias in connections:
        transaction.non_atomic_requests(using=alias)(door)
    DOOR.add(door)
    return door


def answer(status: int, content: Any = None) -> HttpResponse:
    """Return a response as lmstfy writes it."""
    if content is None:
        response = HttpResponse(status=status)
        del response["Content-Type"]
    else:
        text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).translate(_ESCAPED)
        response = HttpResponse(text, status=status, content_type="application/json; charset=utf-8")
        response["Content-Length"] = str(len(response.content))
    response["X-Request-Id"] = jobs.request_id()
    return response


def refused(error: tokens.RequestRefused) -> HttpResponse:
    """Return the response that says why a request is refused."""
    response = answer(error.status, error.content)
    for name, value in error.headers.items():
        response[name] = value
    return response


def _safely(act: Callable[P, T]) -> Callable[P, T | HttpResponse]:
    """Have a function return the response that says why it failed."""

    @wraps(act)
    def made(*args: P.args, **kwargs: P.kwargs) -> T | HttpResponse:
        try:
            return act(*args, **kwargs)
        except tokens.RequestRefused as error:
            return refused(error)
        except DatabaseError:
            logger.exception("A request by HTTP failed")
            return refused(tokens.RequestRefused(500, "internal error"))

    return made


@_door
def api(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request of a namespace. A poll waits in this thread."""
    if hasattr(request, "scope") and once.is_first("holds a thread", "http"):
        logger.warning("Polls by HTTP hold threads: wrap the application of asgi.py in django_delayq.http.asgi.Door")
    call, response = attempt(api, request, {"path": path})
    if response is None:
        assert isinstance(call, calls.Consume)
        response = step(call, call.wait)
        assert response is not None
    return response


def attempt(view: View, request: HttpRequest, names: Mapping[str, str]) -> Attempt:
    """Answer a request as far as it goes without waiting: a poll that waits has no response yet."""
    if view is not api:
        return None, view(request, **names)
    call = _call(request, **names)
    return (None, call) if isinstance(call, HttpResponse) else (call, step(call, call.begin))


def step(call: calls.Call, act: Callable[[], object]) -> HttpResponse | None:
    """Do the next part of a call, and answer it. None: it waits."""
    response = _step(call, act)
    if response is not None:
        call.settle(response.status_code)
    return response


@_safely
def _step(call: calls.Call, act: Callable[[], object]) -> HttpResponse | None:
    act()
    return None if call.waits else answer(*call.answer())


@_safely
def _call(request: HttpRequest, path: str) -> calls.Call:
    """Return the call of a request, with its names checked."""
    namespace, *rest = path.split("/")
    queue, *verb = rest or [""]
    shape = "job/*" if verb[:1] == ["job"] and len(verb) == 2 else "/".join(verb)
    made = calls.ROUTES.get((str(request.method), shape))
    if made is None or not all([namespace, queue, *verb]):
        raise tokens.RequestRefused(404, "api not found")
    takes = made is calls.Consume
    names = queue.split(",") if takes else [queue]
    are_right = all(map(_NAME.fullmatch, names)) and (takes or not queue.startswith("_"))
    wrong = "invalid queue name(s)" if takes else "queue name contains forbidden characters"
    refuse_if(not _NAME.fullmatch(namespace), "namespace name contains forbidden characters")
    refuse_if(not are_right, wrong)
    refuse_if(not takes and max(len(namespace), len(queue)) > LONGEST_NAME, "namespace or queue name too long")
    return made(request, namespace, names, verb[-1] if verb else "")


@_door
def unknown(request: HttpRequest) -> HttpResponse:
    """Answer a request for an address that is not there."""
    return refused(tokens.RequestRefused(404, "api not found"))


@_door
def version(request: HttpRequest) -> HttpResponse:
    """Name the version."""
    return answer(200, {"build_commit": "", "build_date": "", "version": __version__})


@_door
@_safely
def info(request: HttpRequest) -> HttpResponse:
    """Name the queues of a namespace in which messages wait. This needs a token that manages it."""
    namespace = _managed(request)
    start, found = f"{namespace}{jobs.SEPARATOR}", statements(router.db_for_write(Message)).queues()
    return answer(200, {namespace: [queue.removeprefix(start) for queue in found if queue.startswith(start)]})


@_door
@_safely
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer Prometheus for a namespace, if an app exposes metrics, and a token manages it."""
    expose = extensions.exposition()
    if expose is None:
        return unknown(request)
    text = expose(router.db_for_write(Message), f"{_managed(request)}{jobs.SEPARATOR}")
    response = HttpResponse(text, content_type="text/plain; version=0.0.4; charset=utf-8")
    response["X-Request-Id"] = jobs.request_id()
    return response


def _managed(request: HttpRequest) -> str:
    namespace = request.GET.get("namespace", "")
    tokens.check(namespace, calls.token_of(request), "manage")
    return namespace
