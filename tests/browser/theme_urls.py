"""The addresses of the project, and those that a theme needs."""

from __future__ import annotations

from django.urls import include, path

from testproject.urls import urlpatterns as of_project

urlpatterns = [path("grappelli/", include("grappelli.urls")), *of_project]
