"""The URLs of the small projects with the admin: see ``start_settings.py``."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
