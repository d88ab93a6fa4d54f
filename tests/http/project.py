"""The ``asgi.py`` of a project with the HTTP door."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

project = get_asgi_application()

# They need the apps that this has loaded.
from django.db import connections  # noqa: E402

from django_delayq.broker.broker_tuning import USUAL  # noqa: E402
from django_delayq.http.asgi import BODY_TIMEOUT, Door  # noqa: E402

# Seconds that a test gives Redis to answer.
USUAL.timeout = float(os.environ.get("DELAYQ_TEST_REDIS_TIMEOUT", USUAL.timeout))

# The most connections of a pool; 0: there is none.
if _most := int(os.environ.get("DELAYQ_TEST_POOL", "0")):
    connections.settings["default"]["OPTIONS"]["pool"] = {"min_size": 1, "max_size": _most}

# Seconds that a test gives a body.
_TIMEOUT = float(os.environ.get("DELAYQ_TEST_BODY_TIMEOUT", BODY_TIMEOUT))

application = Door(project, urlconf="django_delayq.http.urls", body_timeout=_TIMEOUT)
