"""Answers requests of lmstfy's wire. Who polls under ASGI holds no thread while it waits."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from .. import __version__
from ..pull import atake
from . import calls, jobs, tokens

logger = logging.getLogger("django_delayq")

View = Callable[..., Coroutine[Any, Any, HttpResponse]]

LONGEST_NAME = 255
_NAME = re.compile(r"[-_A-Za-z0-9]+")
# What Go writes in JSON instead of these signs.
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def _door(view: View) -> View:
    """Make a view an address that needs no cookie and no login, and that no transaction surrounds."""
    door: View = login_not_required(csrf_exempt(view))
    for alias in connections:
        transaction.non_atomic_requests(using=alias)(door)
    return door


def _answer(status: int, content: Any = None) -> HttpResponse:
    if content is None:
        response = HttpResponse(status=status)
        del response["Content-Type"]
    else:
        text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).translate(_ESCAPED)
        response = HttpResponse(text, status=status, content_type="application/json; charset=utf-8")
    response["X-Request-Id"] = jobs.request_id()
    return response


def _error(status: int, error: str) -> HttpResponse:
    return _answer(status, {"error": error})


def _refused(error: tokens.RequestRefused) -> HttpResponse:
    response = _answer(error.status, error.content)
    for name, value in error.headers.items():
        response[name] = value
    return response


@_door
async def api(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request of a namespace."""
    try:
        call = _route(request, path)
        return _answer(*await _answered(call))
    except tokens.RequestRefused as error:
        return _refused(error)
    except DatabaseError:
        logger.exception("A request by HTTP failed")
        return _error(500, "internal error")


async def _answered(call: calls.Call) -> calls.Answer:
    """Let a request in and answer it. One that has published nothing and got nothing is counted no longer."""
    answer: calls.Answer = (500,)
    try:
        await sync_to_async(call.let_in)()
        found = []
        if isinstance(call, calls.Consume):
            found = [await atake(call.queues, max=call.count, wait=call.timeout, lease=call.ttr)]
        answer = await sync_to_async(call.answer)(*found)
        return answer
    finally:
        if call.counted is not None and answer[0] not in (200, 201):
            await sync_to_async(call.counted.take_back)()


def _route(request: HttpRequest, path: str) -> calls.Call:
    """Return what a request asks for, with names that are right."""
    namespace, *rest = path.split("/")
    queue, *verb = rest or [""]
    shape = "job/*" if verb[:1] == ["job"] and len(verb) == 2 else "/".join(verb)
    made = calls.ROUTES.get((str(request.method), shape))
    if made is None or not all([namespace, queue, *verb]):
        raise tokens.RequestRefused(404, "api not found")
    takes = made is calls.Consume
    if not _NAME.fullmatch(namespace):
        raise tokens.RequestRefused(400, "namespace name contains forbidden characters")
    names = queue.split(",") if takes else [queue]
    if takes and not all(map(_NAME.fullmatch, names)):
        raise tokens.RequestRefused(400, "invalid queue name(s)")
    if not takes and (not _NAME.fullmatch(queue) or queue.startswith("_")):
        raise tokens.RequestRefused(400, "queue name contains forbidden characters")
    if not takes and max(len(namespace), len(queue)) > LONGEST_NAME:
        raise tokens.RequestRefused(400, "namespace or queue name too long")
    return made(request, namespace, names, verb[-1] if verb else "")


@_door
async def unknown(request: HttpRequest) -> HttpResponse:
    """Answer a request for an address that is not there."""
    return _error(404, "api not found")


@_door
async def version(request: HttpRequest) -> HttpResponse:
    """Name the version."""
    return _answer(200, {"build_commit": "", "build_date": "", "version": __version__})


@_door
async def info(request: HttpRequest) -> HttpResponse:
    """Name the queues of each namespace in which messages wait, to who has a token that manages it."""
    return await sync_to_async(_info)(request)


def _info(request: HttpRequest) -> HttpResponse:
    namespace = request.GET.get("namespace", "")
    try:
        tokens.check(namespace, calls.token_of(request), "manage")
    except tokens.RequestRefused as error:
        return _refused(error)
    return _answer(200, {namespace: calls.queues_of(namespace)})
