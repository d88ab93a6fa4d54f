"""The URLs of the shop."""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("orders/", views.create, name="create"),
    path("orders/<int:order_id>/pay/", views.pay, name="pay"),
    path("orders/<int:order_id>/note/", views.annotate, name="annotate"),
]
