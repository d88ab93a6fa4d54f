"""The shop's tables: orders, the stock that they take from, and what handlers did."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from django_delayq import Delivered


class Stock(models.Model):
    """An article, and how many pieces of it can still be ordered."""

    article = models.CharField(max_length=40, unique=True)
    available = models.PositiveIntegerField()

    class Meta:
        verbose_name_plural = "stock"

    def __str__(self) -> str:
        return f"{self.available} × {self.article}"

    def take(self, quantity: int) -> bool:
        """Reserve ``quantity`` pieces. Return False when there are not enough."""
        enough = Stock.objects.filter(pk=self.pk, available__gte=quantity)
        return bool(enough.update(available=F("available") - quantity))

    def give_back(self, quantity: int) -> None:
        """Make ``quantity`` pieces available again."""
        Stock.objects.filter(pk=self.pk).update(available=F("available") + quantity)


class Order(models.Model):
    """An order. Its pieces are reserved until it is paid or closed."""

    class Status(models.TextChoices):
        NEW = "new"
        PAID = "paid"
        CLOSED = "closed"

    email = models.EmailField()
    status = models.CharField(max_length=6, choices=Status.choices, default=Status.NEW)
    note = models.CharField(max_length=200, default="", blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"order {self.pk} ({self.status})"

    @property
    def key(self) -> str:
        """The key of the order's messages."""
        return f"order-{self.pk}"


class Item(models.Model):
    """One line of an order."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="items")
    stock = models.ForeignKey(Stock, on_delete=models.PROTECT)
    quantity = models.PositiveIntegerField()

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(name="shop_some_pieces", condition=Q(quantity__gte=1))]

    def __str__(self) -> str:
        return f"{self.quantity} × {self.stock.article}"


class Deed(models.Model):
    """Something that a handler did, with the message and the delivery by which it did so."""

    what = models.CharField(max_length=100)
    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="deeds", null=True)
    message_id = models.BigIntegerField()
    delivery = models.IntegerField()
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.what

    @classmethod
    def of(cls, message: Delivered, what: str, order: Order | None = None) -> Deed:
        """Make the deed of a delivery, without saving it."""
        return cls(what=what, order=order, message_id=message.id, delivery=message.deliveries)
