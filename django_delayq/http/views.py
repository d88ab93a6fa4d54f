"""Answers requests of lmstfy's wire: step by step, and as a view of Django."""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.contrib.auth.decorators import login_not_required
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.views.decorators.csrf import csrf_exempt

from ..core import once
from . import calls, tokens
from .exchange import DIGITS, LARGEST_BODY, LONGEST_NAME, NAME, Reply, Request, RequestRefused, refuse_if

logger = logging.getLogger("django_delayq")

# Each queue of a request is a statement.
MOST_QUEUES = 100


class _Response(HttpResponse):
    """An answer. Once it is sent, the use of its token is written."""

    def close(self) -> None:
        tokens.write_uses()
        super().close()


@csrf_exempt
@login_not_required
def door(request: HttpRequest, path: str) -> HttpResponse:
    """Answer a request for an address of the door. A poll waits in this thread."""
    if hasattr(request, "scope") and once.is_first("holds a thread", "http"):
        logger.warning("Polls by HTTP hold threads: wrap the application of asgi.py in django_delayq.http.asgi.Door")
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        asked = Request(str(request.method), path, request.GET.dict(), headers, _body(request))
    except RequestRefused as error:
        answer: Reply | None = error.answer
    else:
        call, answer = attempt(asked)
        if isinstance(call, calls.Consume) and answer is None:
            answer = step(call, call.wait)
    assert answer is not None
    told, body = answer.written()
    response = _Response(body, status=answer.status, headers=told)
    if not body:
        # Django adds one to each response.
        del response["Content-Type"]
    return response


# The door needs no cookie, and no transaction surrounds it.
for _alias in connections:
    transaction.non_atomic_requests(using=_alias)(door)


def _body(request: HttpRequest) -> bytes:
    """Return the body of a request, and no more of it than the largest body. Raises ``RequestRefused``."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    # Under WSGI Django reads no body whose length is not told.
    is_unseen = "Transfer-Encoding" in request.headers and not hasattr(request, "scope")
    try:
        if is_unseen or not DIGITS.fullmatch(length):
            raise UnreadablePostError
        found: bytes = b"" if int(length) > LARGEST_BODY else request.read(LARGEST_BODY + 1)
    except UnreadablePostError:
        raise RequestRefused(400, "failed to read body") from None
    refuse_if(max(int(length), len(found)) > LARGEST_BODY, "body too large", 413)
    return found


def attempt(request: Request) -> tuple[calls.Call | None, Reply | None]:
    """Answer a request as far as it goes without waiting: a poll that waits has no answer yet."""
    try:
        call = _call(request)
    except RequestRefused as error:
        return None, error.answer
    return call, step(call, call.begin)


def step(call: calls.Call, act: Callable[[], object]) -> Reply | None:
    """Do the next part of a call, and answer it. None: it waits."""
    try:
        act()
        if call.waits:
            return None
        answer = Reply(*call.answer())
    except RequestRefused as error:
        answer = error.answer
    except Exception:
        # Of the database, or of middleware of the project.
        logger.exception("A request by HTTP failed")
        answer = RequestRefused(500, "internal error").answer
    call.settle(answer.status)
    return answer


def _call(request: Request) -> calls.Call:
    """Return the call of a request, with its names checked. Raises ``RequestRefused``."""
    if page := calls.PAGES.get(request.path):
        return page(request, request.query.get("namespace", ""))
    place, *parts = request.path.split("/")
    namespace, queue, *verb = parts if len(parts) > 1 else ("", "")
    shape = "job/*" if verb[:1] == ["job"] and len(verb) == 2 else "/".join(verb)
    made = calls.ROUTES.get((request.method, shape))
    if made is None or place != "api" or not all([namespace, queue, *verb]):
        raise RequestRefused(404, "api not found")
    takes = made is calls.Consume
    names = [*dict.fromkeys(queue.split(","))] if takes else [queue]
    are_right = all(map(NAME.fullmatch, names)) and (takes or not queue.startswith("_"))
    wrong = "invalid queue name(s)" if takes else "queue name contains forbidden characters"
    refuse_if(not NAME.fullmatch(namespace), "namespace name contains forbidden characters")
    refuse_if(not are_right, wrong)
    refuse_if(len(names) > MOST_QUEUES, "too many queues")
    refuse_if(not takes and max(len(namespace), len(queue)) > LONGEST_NAME, "namespace or queue name too long")
    return made(request, namespace, names, verb[-1] if verb else "")
