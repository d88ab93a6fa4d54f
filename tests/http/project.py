"""The ``asgi.py`` of a project with the HTTP door."""

from __future__ import annotations

from django.core.asgi import get_asgi_application

project = get_asgi_application()

# It needs the apps that this has loaded.
from django_delayq.http.asgi import Door  # noqa: E402

application = Door(project, urlconf="django_delayq.http.urls")
