"""The tokens by which programs are let in."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.text import get_text_list
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

# The rights, as they stand before "the queues of".
RIGHTS = {"publish": _("publish to"), "consume": _("consume from"), "manage": _("manage")}


class Token(models.Model):
    """A token of a namespace. Only its digest is kept: the token itself is shown once."""

    namespace = models.CharField(_("namespace"), max_length=255)
    # SHA-256 of the token, in hexadecimal digits.
    digest = models.CharField(max_length=64, unique=True)
    # Its first characters, by which people tell tokens apart.
    beginning = models.CharField(_("beginning"), max_length=8)
    # The rights, with commas between them: publish, consume, manage.
    rights = models.CharField(_("rights"), max_length=40)
    description = models.CharField(_("description"), max_length=200, blank=True)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)
    # The token is good until then; NULL: for ever.
    expires_at = models.DateTimeField(_("expires at"), null=True)
    # The most calls in an interval that take jobs, and that publish some; NULL: any number.
    reads = models.IntegerField(_("reads"), null=True)
    writes = models.IntegerField(_("writes"), null=True)
    # Seconds; NULL when there is no limit.
    interval = models.IntegerField(_("interval in seconds"), null=True)
    # The last call with it, some minutes more or less; NULL: none yet.
    used_at = models.DateTimeField(_("last used"), null=True)

    objects: ClassVar[models.Manager[Token]] = models.Manager()

    class Meta:
        db_table = "delayq_token"
        verbose_name = _("token")
        verbose_name_plural = _("tokens")

    def __str__(self) -> str:
        return f"{self.beginning}… of {self.namespace}"

    def may(self, right: str) -> bool:
        """Return whether the token has a right."""
        return right in self.rights.split(",")

    @property
    def rights_in_words(self) -> str:
        """What the token may do, in the language of the reader."""
        verbs = [str(text) for right, text in RIGHTS.items() if self.may(right)]
        if len(verbs) == len(RIGHTS):
            return gettext("all rights to the queues of %(namespace)s") % {"namespace": self.namespace}
        told = {"verbs": get_text_list(verbs, gettext("and")), "namespace": self.namespace}
        return gettext("%(verbs)s the queues of %(namespace)s") % told

    @property
    def limits(self) -> str:
        """The limits, in the language of the reader; "" when there is none."""
        texts = ((self.reads, gettext("%(count)s reads")), (self.writes, gettext("%(count)s writes")))
        told = ", ".join(text % {"count": most} for most, text in texts if most is not None)
        return told and gettext("%(calls)s in %(interval)d s") % {"calls": told, "interval": self.interval or 1}
