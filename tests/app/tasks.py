"""Tasks of Django's task framework that succeed, fail or wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async

from django_delayq import Reject, RetryLater, acancel_message
from django_delayq.contrib.tasks import options
from django_delayq.contrib.tasks.compat import AnyContext

from .models import Effect

if TYPE_CHECKING:
    from django.tasks import task
else:
    try:
        from django.tasks import task
    except ModuleNotFoundError:
        from django_tasks import task


class Broken(Exception):
    pass


@task
def add(one: int, other: int = 0) -> int:
    return one + other


@task(queue_name="mails", priority=7)
async def greet(name: str) -> str:
    await asyncio.sleep(0)
    await sync_to_async(Effect.objects.create)(message_id=0, delivery=0, note=name)
    return f"hello {name}"


@task
def fail() -> None:
    raise Broken("it never works\nos.system: not a class path")


@task(takes_context=True)
@options(retry=[0, 0])
def tell_attempt(context: AnyContext, good: int) -> list[Any]:
    if context.attempt < good:
        raise Broken(f"attempt {context.attempt}")
    return [context.task_result.id, context.attempt, len(context.task_result.errors)]


@task
@options(transactional=True, retry=["10m"])
def affect(note: str) -> str:
    Effect.objects.create(message_id=0, delivery=0, note=note)
    if note == "fail":
        raise Broken(note)
    if note == "reject":
        raise Reject(note)
    if note == "later":
        raise RetryLater(60, note)
    return note


@task
@options(transactional=True)
def touch_nothing() -> None:
    pass


@task
def count_down(steps: int, *, done: int = 0) -> int:
    """Do one step, and leave the others for the next attempt."""
    if steps:
        raise RetryLater(0, counts=False, payload={"args": [steps - 1], "kwargs": {"done": done + 1}})
    return done


@task
def leave_nonsense() -> None:
    raise RetryLater(0, counts=False, payload=["no arguments"])


@task
@options(timeout="0.5s")
async def outlast() -> None:
    await asyncio.Event().wait()


@task(takes_context=True)
async def have_itself_cancelled(context: AnyContext) -> None:
    await acancel_message(context.task_result.id)
    await asyncio.Event().wait()


@task
def return_anything(what: str) -> Any:
    return {"object": object(), "nul": "\x00", "bytes": b"text", "tuple": (1, (2,))}[what]


@task
@options(key=lambda order: f"order-{order}", on_conflict="keep")
def close_once(order: int) -> int:
    return order


@task
@options(batch=2, linger="10s", retry=[0])
def index(pages: list[int]) -> None:
    Effect.objects.create(message_id=0, delivery=0, note=str(pages))
    if 13 in pages:
        raise Broken("13")


@task
@options(batch=2, linger="10s", transactional=True)
async def index_async(pages: list[int]) -> None:
    await sync_to_async(Effect.objects.create)(message_id=0, delivery=0, note=str(pages))


@task
@options(redeliver=False, retry=["1m"])
def tell_at_most_once() -> None:
    pass


@task(backend="here")
def stay() -> None:
    pass


@task
@options(topic="t.short_path", lease="2m")
def have_another_topic() -> str:
    return "done"
