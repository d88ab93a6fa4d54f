"""The addresses of lmstfy's wire: ``path("", include("django_delayq.http.urls"))``."""

from __future__ import annotations

from django.urls import re_path

from . import views

urlpatterns = [re_path(r"^(?P<path>api/[\s\S]*|version|info|metrics)\Z", views.door)]
