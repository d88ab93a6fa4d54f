"""Two admin sites side by side."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from django_delayq.console.admin import register

backstage = admin.AdminSite(name="backstage")
register(backstage)

urlpatterns = [path("admin/", admin.site.urls), path("backstage/", backstage.urls)]
