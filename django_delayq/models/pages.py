"""Pages of the admin that show no table of their own: as proxies they have a link, a name and a place in the menu."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .record import Message


class Dashboard(Message):
    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")


class DeadLetter(Message):
    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class Health(Message):
    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("health")
        verbose_name_plural = _("health")
