"""The tokens by which programs are let in."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Token(models.Model):
    """A token of a namespace. Only its digest is kept: the token itself is shown once."""

    namespace = models.CharField(max_length=255)
    # SHA-256 of the token, in hexadecimal digits.
    digest = models.CharField(max_length=64, unique=True)
    # Its first characters, by which people tell tokens apart.
    beginning = models.CharField(max_length=8)
    # The rights, with commas between them: publish, consume, manage.
    rights = models.CharField(max_length=40)
    description = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    # The token is good until then; NULL: for ever.
    expires_at = models.DateTimeField(null=True)

    objects: ClassVar[models.Manager[Token]] = models.Manager()

    class Meta:
        db_table = "delayq_token"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.beginning}… of {self.namespace}"
