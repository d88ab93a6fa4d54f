"""Receipts: signed texts that name a delivery. Any process with the same SECRET_KEY can answer by them."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.core.signing import BadSignature, Signer

from ..core.exceptions import DelayqError
from ..core.text import shown


class InvalidReceipt(DelayqError, ValueError):
    """This is no receipt of this project and database."""


class Receipt(NamedTuple):
    """A delivery, and how long after a failure its message is delivered again. None: it was the last attempt."""

    id: int
    delivery: int
    # Seconds.
    delay: float | None = None


def signer(using: str) -> Signer:
    """Return the signer of the receipts of a database alias: those of another alias are refused."""
    return Signer(salt=f"django_delayq.pull.{using}")


def text_of(receipt: Receipt, by: Signer) -> str:
    """Return the text of a receipt."""
    delay = "" if receipt.delay is None else f"{receipt.delay:.3f}"
    return by.sign(f"{receipt.id}-{receipt.delivery}-{delay}")


def read(text: Any, by: Signer) -> Receipt:
    """Return the receipt that a text stands for. Raises ``InvalidReceipt``."""
    if not isinstance(text, str):
        raise InvalidReceipt(f"a receipt is the text message.receipt, not {shown(text)}")
    try:
        pk, delivery, delay = by.unsign(text).split("-")
    except (BadSignature, UnicodeEncodeError):
        raise InvalidReceipt from None
    return Receipt(int(pk), int(delivery), float(delay) if delay else None)
