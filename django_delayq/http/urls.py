"""The addresses of lmstfy's wire: ``path("", include("django_delayq.http.urls"))``."""

from __future__ import annotations

from django.urls import path, re_path

from . import views

urlpatterns = [
    re_path(r"^api/(?P<path>[\s\S]*)\Z", views.api),
    path("version", views.version),
    path("info", views.info),
    path("metrics", views.metrics),
]
