"""The addresses of the HTTP door at the root; no others are there."""

from __future__ import annotations

from django.urls import include, path, re_path

from django_delayq.http import views

urlpatterns = [path("", include("django_delayq.http.urls")), re_path("", views.door, {"path": ""})]
