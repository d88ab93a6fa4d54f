"""Pages for probes of web processes, in JSON: ``path("delayq/", include("django_delayq.urls"))``.

``live/`` asks nobody: it answers as long as the process does. ``ready/`` tells whether messages can be scheduled, with
status 503 when the database does not answer. Without Redis they can: the answer says that Redis is away, and the status
stays 200. It stays 200, too, for a Redis that answers and that workers do not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.db import Error as DatabaseError
from django.db import connections, router, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .broker import index
from .core.exceptions import BrokerUnavailable, UnusableBroker
from .models.messages import Identity
from .record.sql.sessions import TooSlow, statement_timeout
from .restore import horizon

# A database or a Redis that takes longer to answer is not available: a probe waits for a second by default.
# Milliseconds.
TIMEOUT_MS = 400

View = Callable[[HttpRequest], JsonResponse]


def _probe(view: View) -> View:
    """Make a view a page that anybody may read at any time, and that no transaction surrounds."""
    page: View = login_not_required(never_cache(require_safe(view)))
    for alias in connections:
        # Without an alias it would exempt the page from the transactions of the default database only.
        transaction.non_atomic_requests(using=alias)(page)
    return page


@_probe
def live(request: HttpRequest) -> JsonResponse:
    """Answer that this process answers."""
    return JsonResponse({"status": "ok"})


@_probe
def ready(request: HttpRequest) -> JsonResponse:
    """Ask the database and Redis. About errors the page says only that there is one, or why Redis is not used."""
    using = router.db_for_write(Identity)
    database = _database(using)
    # Without the database nobody can tell whose Redis it is.
    redis = _redis(using, is_told_apart=database == "ok")
    is_degraded = redis["redis"] in ("unavailable", "unusable")
    status = "unavailable" if database != "ok" else "degraded" if is_degraded else "ok"
    answer = {"status": status, "database": database, **redis}
    return JsonResponse(answer, status=503 if status == "unavailable" else 200)


def _database(using: str) -> str:
    """Read the one row of a table of the queue: its tables are there then, too."""
    try:
        with statement_timeout(using, TIMEOUT_MS):
            Identity.objects.using(using).exists()
    except (DatabaseError, TooSlow):
        return "unavailable"
    return "ok"


def _redis(using: str, *, is_told_apart: bool) -> dict[str, Any]:
    """Ask what a worker asks before it uses Redis."""
    broker = index(using, timeout=TIMEOUT_MS / 1000)
    if broker is None:
        return {"redis": "none"}
    try:
        meta = broker.read_meta()
        horizon.writable_server(broker)
        if is_told_apart:
            horizon.refuse_foreign(using, meta)
        broker.write_nothing()
    except UnusableBroker as error:
        return {"redis": "unusable", "why": str(error)}
    except (BrokerUnavailable, DatabaseError):
        return {"redis": "unavailable"}
    finally:
        broker.close()
    if (found := broker.cluster.hash_slot) is None:
        return {"redis": "ok"}
    # No host: anybody may read the page.
    return {"redis": "ok", "cluster": {"slot": found.number, "replicas": len(found.replicas)}}


app_name = "delayq"
urlpatterns = [path("live/", live, name="live"), path("ready/", ready, name="ready")]
