"""The examples of the README do what the README says."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db import transaction
from django.http import JsonResponse
from django.test import RequestFactory

from django_delayq import handler, run_message, schedule_message
from django_delayq.models import Message
from testproject.shop.models import Order

from .blocks import README, blocks
from .conftest import deliver
from .project import Project

# What the README leaves to the reader.
MODELS = """
from django.conf import settings
from django.db import models


class Order(models.Model):
    customer = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    status = models.CharField(max_length=10, default="new")
    stock_released = models.IntegerField(default=0)

    def release_stock(self):
        self.stock_released += 1
"""

FOLLOWED = """
import json
from types import SimpleNamespace
from django.contrib.auth.models import User
from django.core.management import call_command
from django_delayq import run_message
from orders import views
from orders.models import Order

def answer(response):
    return response.status_code, json.loads(response.content)

def deliver():
    call_command("run_delayq", "--once", "--threads", "1")

request = SimpleNamespace(user=User.objects.create_user("anna"))
assert answer(views.create(request)) == (201, {"id": 1})
assert answer(views.pay(request, 1)) == (200, {"id": 1})
deliver()
assert Order.objects.get(pk=1).status == "paid"

views.create(request)
deliver()
assert Order.objects.get(pk=2).status == "new"
assert run_message(topic="orders.close", key="order-2")
deliver()
assert answer(views.pay(request, 2)) == (409, {"error": "too late"})
closed = Order.objects.get(pk=2)
assert (closed.status, closed.stock_released) == ("closed", 1)
"""


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("free_topics")
def test_the_first_example_closes_an_order(rf: RequestFactory) -> None:
    names: dict[str, Any] = {
        "Order": Order,
        "JsonResponse": JsonResponse,
        "handler": handler,
        "schedule_message": schedule_message,
        "transaction": transaction,
    }
    exec(blocks(README)[0].text, names)
    assert names["create"](rf.post("/", {"email": "anna@example.com"})).status_code == 201
    message = Message.objects.get(topic="orders.close")
    assert message.payload is not None
    order = Order.objects.get(pk=message.payload["order"])
    assert (message.due_at - order.created_at).total_seconds() == pytest.approx(900, abs=60)
    assert run_message(message)
    deliver()
    order.refresh_from_db()
    assert order.status == "closed"


def test_the_quick_start_with_the_example_makes_a_project_that_closes_orders(
    mysite: Project, redis_client: redis.Redis
) -> None:
    mysite.write("orders/models.py", MODELS)
    mysite.write("mysite/settings.py", 'INSTALLED_APPS += ["orders"]\n')
    files = [block for block in blocks(README) if block.path]
    assert {block.path for block in files} == {"orders/views.py", "orders/handlers.py", "mysite/settings.py"}
    for block in files:
        mysite.follow(block)
    mysite.run("python manage.py makemigrations orders")
    mysite.run("python manage.py migrate")
    mysite.python(FOLLOWED)
