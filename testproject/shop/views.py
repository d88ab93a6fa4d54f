"""Views that place, pay and annotate orders, as JSON over HTTP."""

from __future__ import annotations

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from . import orders
from .models import Order

# The pieces of one article in one order.
MAX_PIECES = 100

# csrf_exempt: these views read no session and no cookie, so a foreign page cannot act as their user.


@csrf_exempt
@require_POST
def create(request: HttpRequest) -> JsonResponse:
    """Place an order: ``{"email": …, "articles": {"lamp": 2}}`` → 201; 400 for anything else; 409 when sold out."""
    try:
        email, articles = _wanted(_body(request))
    except (ValueError, ValidationError) as error:
        return JsonResponse({"error": f"not an order: {error}"}, status=400)
    try:
        order = orders.place(email, articles)
    except orders.SoldOut as error:
        return JsonResponse({"error": f"sold out: {error}"}, status=409)
    return JsonResponse(_shown(order), status=201)


@csrf_exempt
@require_POST
def pay(request: HttpRequest, order_id: int) -> JsonResponse:
    """Pay an order: 200 when it is paid; 409 when it was closed before."""
    try:
        order = orders.pay(order_id)
    except Order.DoesNotExist:
        return _no_such_order()
    except orders.TooLate as error:
        return JsonResponse({"error": f"too late: {error}"}, status=409)
    return JsonResponse(_shown(order))


@csrf_exempt
@require_POST
def annotate(request: HttpRequest, order_id: int) -> JsonResponse:
    """Write a note on an order: ``{"note": …}`` → 200."""
    try:
        note = _body(request).get("note")
        if not isinstance(note, str) or len(note) > 200 or not note.isprintable():
            raise ValueError("a note is up to 200 printable characters")
        order = orders.annotate(order_id, note)
    except ValueError as error:
        return JsonResponse({"error": str(error)}, status=400)
    except Order.DoesNotExist:
        return _no_such_order()
    return JsonResponse(_shown(order))


def _body(request: HttpRequest) -> dict[str, Any]:
    data = json.loads(request.body)
    if not isinstance(data, dict):
        raise ValueError("a JSON object is wanted")
    return data


def _wanted(data: dict[str, Any]) -> tuple[str, dict[str, int]]:
    email, articles = data.get("email"), data.get("articles")
    if not isinstance(email, str) or not isinstance(articles, dict) or not articles:
        raise ValueError("email and articles are wanted")
    validate_email(email)
    for article, quantity in articles.items():
        if type(quantity) is not int or not 1 <= quantity <= MAX_PIECES or not article.isprintable():
            raise ValueError(f"of an article 1 to {MAX_PIECES} pieces can be ordered")
    return email, articles


def _shown(order: Order) -> dict[str, Any]:
    return {"id": order.pk, "status": order.status}


def _no_such_order() -> JsonResponse:
    return JsonResponse({"error": "no such order"}, status=404)
