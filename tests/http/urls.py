"""The addresses of the HTTP door, at the root."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("", include("django_delayq.http.urls"))]
