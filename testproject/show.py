"""The demo's show: customers of the shop, the deliveries of their messages, and the loss of Redis in between.

Everything that is printed is read from the record and from Redis; nothing comes from the worker.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Count, Max, Sum
from django.test import Client
from django_redis import get_redis_connection

from django_delayq.broker.keys import keys
from django_delayq.core.states import FINAL, State
from django_delayq.models import Message, Transition
from django_delayq.project import conf as delayq_conf
from django_delayq.record import reads

from .shop import conf, orders
from .shop.models import Deed, Item, Order, Stock

ORDERS = 12
READERS = 24
PIECES = 100
# The script. Seconds between two orders, from an order to its payment, between two news, and from start to wipe.
ORDER_SECONDS = 0.3
PAID_AFTER_SECONDS = 1.2
NEWS_SECONDS = 0.4
WIPE_AFTER_SECONDS = 5.0
# A message that is not finished by then counts as lost.
MAX_SECONDS = 45.0
# Twice the lateness that a loss of Redis explains, for a slow machine.
MAX_LATENESS_SECONDS = 10.0


class Show:
    """One run. It reads only messages that are scheduled after it was made."""

    def __init__(self, *, own_redis: bool) -> None:
        self.redis = Redis(own_redis) if delayq_conf.get().REDIS else None
        self.customers = Client()
        self.todo: list[tuple[float, Callable[[], None]]] = []
        self.placed: list[int] = []
        self.before = Message.objects.aggregate(last=Max("id"))["last"] or 0
        self.seen: set[tuple[int, int]] = set()
        self.start = reads.now(DEFAULT_DB_ALIAS)
        self.began = time.monotonic()
        self.printed = 0.0
        self.wiped: float | None = None
        self.loaded: float | None = None

    def run(self) -> bool:
        """Run the whole script. Return whether everything was delivered once and in time."""
        self._introduce()
        self.todo = sorted(self._script(), key=lambda step: step[0])
        while self.todo or (self._live() and self._now() < MAX_SECONDS):
            due = [step for step in self.todo if step[0] <= self._now()]
            self.todo = [step for step in self.todo if step not in due]
            for _when, act in due:
                act()
            self._watch_redis()
            self._print_news(every=0.1)
            time.sleep(0.01)
        self._print_news()
        healthy = self._summary()
        self._print_log()
        return healthy

    # --- the script ---------------------------------------------------------------------------------------------------

    def _script(self) -> Iterable[tuple[float, Callable[[], None]]]:
        yield 0.0, self._news
        for number in range(ORDERS):
            yield ORDER_SECONDS * number, self._order
            if number % 3 == 2:
                yield ORDER_SECONDS * number + PAID_AFTER_SECONDS, partial(self._pay, number)
        yield ORDER_SECONDS * 4 + 1.0, self._annotate
        yield WIPE_AFTER_SECONDS - 0.5, self._pay_late
        if self.redis:
            yield WIPE_AFTER_SECONDS, self._wipe

    def _introduce(self) -> None:
        Stock.objects.update_or_create(article="lamp", defaults={"available": PIECES})
        self.sold_before = self._sold()
        then = (
            f"After {WIPE_AFTER_SECONDS:g} s Redis is wiped." if self.redis else "There is no Redis: nothing is wiped."
        )
        quarter = conf.close_after().total_seconds()
        paid = len(range(2, ORDERS, 3))
        print(
            f"""
The shop runs {conf.speed():g} times faster than real time: a quarter of an hour lasts {quarter:g} s.
  {ORDERS} orders come in. Each schedules, in its own transaction, its closing in 15 minutes and a reminder in 10.
  {paid} of them are paid in time: closing and reminder are cancelled, and the bank is called. It does not answer at
    first, so it is called again after 4 minutes, 10 minutes, 10 minutes, an hour …
  {READERS} readers get the news: one call schedules them all, one for every {NEWS_SECONDS:g} s.
  {then}
"""
        )
        self._line("message", "topic", "about", "due", "delivered", "late", "what came of it", style="1")

    def _news(self) -> None:
        orders.send_news((f"reader{number}@example.com" for number in range(1, READERS + 1)), spacing=NEWS_SECONDS)

    def _order(self) -> None:
        answer = self._post("/orders/", {"email": "anna@example.com", "articles": {"lamp": 2}})
        self.placed.append(answer["id"])

    def _pay(self, number: int) -> None:
        self._post(f"/orders/{self.placed[number]}/pay/", {})

    def _annotate(self) -> None:
        self._post(f"/orders/{self.placed[4]}/note/", {"note": "I will pay tonight"})

    def _pay_late(self) -> None:
        """Try to pay the first order, which should be closed by now; wait for that if not."""
        if Order.objects.get(pk=self.placed[0]).status != Order.Status.CLOSED and self._now() < MAX_SECONDS:
            self.todo.append((self._now() + 0.1, self._pay_late))
            return
        answer = self._post(f"/orders/{self.placed[0]}/pay/", {}, expect=409)
        self._say(f"Order {self.placed[0]} would be paid now, but is refused: {answer['error']}")

    def _post(self, path: str, data: dict[str, Any], expect: int | None = None) -> dict[str, Any]:
        response = self.customers.post(path, data, content_type="application/json")
        if response.status_code not in ((200, 201) if expect is None else (expect,)):
            raise RuntimeError(f"POST {path}: {response.status_code} {response.content!r}")
        answer: dict[str, Any] = response.json()
        return answer

    # --- Redis --------------------------------------------------------------------------------------------------------

    def _wipe(self) -> None:
        assert self.redis is not None
        held = self.redis.held()
        how = self.redis.wipe()
        self.wiped = self._now()
        self._say(f"Redis is wiped now: {how}. It held {held} messages; now {self.redis.held()}.", style="1;33")

    def _watch_redis(self) -> None:
        if self.redis is None or self.wiped is None or self.loaded is not None or not self.redis.loaded():
            return
        self.loaded = self._now()
        took = (self.loaded - self.wiped) * 1000
        self._say(
            f"Redis is loaded again from the record, {took:.0f} ms later. It holds {self.redis.held()} messages.",
            style="1;32",
        )

    # --- printed while it runs ----------------------------------------------------------------------------------------

    def _print_news(self, every: float = 0.0) -> None:
        if self._now() - self.printed < every:
            return
        self.printed = self._now()
        moves = Transition.objects.filter(message_id__gt=self.before).select_related("message").order_by("at", "number")
        deliveries = self._deliveries(moves)
        for move in moves:
            place = (move.message_id, move.number)
            if place not in self.seen and move.from_state is not None and move.to_state != State.RUNNING:
                self._print_move(move, deliveries.get((move.message_id, move.delivery)))
            self.seen.add(place)

    def _print_move(self, move: Transition, delivery: Delivery | None) -> None:
        message, due, delivered, late = move.message, move.due_at, "", ""
        if move.from_state == State.RUNNING and delivery is not None:
            due = delivery.due
            delivered, late = self._seconds(delivery.at), f"{delivery.lateness * 1000:.1f} ms"
        self._line(
            f"#{move.message_id}",
            message.topic,
            about(message),
            self._seconds(due),
            delivered,
            late,
            self._outcome(move),
            style={State.CANCELLED: "2", State.SCHEDULED: "33", State.DEAD: "31"}.get(State(move.to_state), ""),
        )

    def _outcome(self, move: Transition) -> str:
        match move.to_state:
            case State.CONSUMED:
                return "done"
            case State.CANCELLED:
                return f"cancelled: {move.reason}"
            case State.SCHEDULED if move.from_state == State.RUNNING:
                # "HTTPError: HTTP Error 503: Service Unavailable"; the log at the end has it in full.
                failure = move.error.partition(": ")[2].partition(":")[0] or move.reason
                return f"{failure}; again at {self._seconds(move.due_at)}"
            case State.SCHEDULED:
                return f"put off ({move.reason})"
            case _:
                return f"{move.to_state}: {move.error or move.reason}"

    def _line(
        self, message: str, topic: str, about: str, due: str, delivered: str, late: str, *rest: str, style: str
    ) -> None:
        _print(f"{message:>8}  {topic:<17}  {about:<9}  {due:>9}  {delivered:>9}  {late:>9}  {' '.join(rest)}", style)

    def _say(self, text: str, style: str = "1") -> None:
        self._print_news()
        _print(f"{self._now():8.3f} s  {text}", style)

    # --- printed at the end -------------------------------------------------------------------------------------------

    def _summary(self) -> bool:
        messages = self._messages()
        states = Counter(messages.values_list("state", flat=True))
        moves = Transition.objects.filter(message_id__gt=self.before).order_by("at")
        deliveries = self._deliveries(moves).values()
        lost = messages.count() - states[State.CONSUMED] - states[State.CANCELLED]
        twice = self._deeds().values("message_id").annotate(times=Count("id")).filter(times__gt=1).count()
        retried = messages.filter(attempts__gt=0).count()
        shelf = Stock.objects.get(article="lamp").available
        sold = self._sold() - self.sold_before
        late = [delivery.lateness for delivery in deliveries]
        print(
            f"\n{messages.count()} messages: {states[State.CONSUMED]} delivered, {retried} of them after retries; "
            f"{states[State.CANCELLED]} cancelled."
            f"\nLost: {lost}. Effects that happened twice: {twice}. "
            f"Lamps: {PIECES} = {shelf} on the shelf + {sold} sold."
        )
        _print(f"Lateness of {len(late)} deliveries: {spread(late)}", "1")
        if self.wiped is not None:
            until = self.wiped if self.loaded is None else self.loaded
            hit = [d.lateness for d in deliveries if self.wiped <= self._offset(d.due) <= until]
            rest = [d.lateness for d in deliveries if not self.wiped <= self._offset(d.due) <= until]
            print(f"  {len(hit):3} that fell due while Redis was empty: {spread(hit)}")
            print(f"  {len(rest):3} others: {spread(rest)}")
        return not lost and not twice and shelf + sold == PIECES and max(late, default=0.0) <= MAX_LATENESS_SECONDS

    def _print_log(self) -> None:
        """Print the whole log of one message that was retried twice."""
        message = self._messages().filter(topic="payments.callback", attempts=2).first()
        if message is None:
            return
        print(f"\nThe log of message #{message.pk}, {message.topic} for {about(message)} (message.transitions.all()):")
        _print(f"{'at':>10}  {'from':<9}    {'to':<9}  {'delivery':>8}  {'due':>9}  actor, error", "1")
        for move in message.transitions.all():
            actor = "/".join(move.actor.removeprefix("worker:").split("/")[:2])
            what = f"{actor}: {move.error}" if move.error else actor
            print(
                f"{self._seconds(move.at):>10}  {move.from_state or '':<9} → {move.to_state:<9}  "
                f"{move.delivery or '':>8}  {self._seconds(move.due_at):>9}  {what}"
            )
        print("A message becomes running a moment before it is due; its handler starts at the due time itself.")

    # --- the record ---------------------------------------------------------------------------------------------------

    def _messages(self) -> Any:
        return Message.objects.filter(pk__gt=self.before).order_by("pk")

    def _deeds(self) -> Any:
        return Deed.objects.filter(message_id__gt=self.before)

    def _deliveries(self, moves: Iterable[Transition]) -> dict[tuple[int, int], Delivery]:
        """Return each delivery by message and number, with its due time and the time of its effect or its start."""
        deeds = {(deed.message_id, deed.delivery): deed.at for deed in self._deeds()}
        return {
            (move.message_id, move.delivery): Delivery(
                move.due_at,
                # A message that was claimed a moment early starts when it is due.
                deeds.get((move.message_id, move.delivery)) or max(move.at, move.ready_at or move.at),
            )
            for move in moves
            if move.from_state == State.SCHEDULED and move.to_state == State.RUNNING
        }

    def _live(self) -> bool:
        return bool(self._messages().exclude(state__in=FINAL).exists())

    def _sold(self) -> int:
        sold = Item.objects.filter(order__status=Order.Status.PAID, stock__article="lamp")
        return sold.aggregate(sum=Sum("quantity"))["sum"] or 0

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _offset(self, moment: datetime) -> float:
        return (moment - self.start).total_seconds()

    def _seconds(self, moment: datetime) -> str:
        return f"{self._offset(moment):.3f} s"


class Delivery(NamedTuple):
    """One delivery of a message, as the record has it."""

    due: datetime
    at: datetime

    @property
    def lateness(self) -> float:
        """The seconds from the due time to the delivery."""
        return (self.at - self.due).total_seconds()


class Redis:
    """The demo's own access to Redis: it counts the messages there, and wipes them."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.prefix = delayq_conf.get().PREFIX
        self.keys = keys(self.prefix, delayq_conf.get().DEFAULT_QUEUE)
        self.client = get_redis_connection(settings.DELAYQ["REDIS"])

    def held(self) -> int:
        """Return the number of messages in Redis."""
        return int(self.client.zcard(self.keys.delayed) + self.client.zcard(self.keys.ready))

    def wipe(self) -> str:
        """Delete everything in the demo's own Redis, only the demo's keys in another. Return in words how."""
        if self.own:
            self.client.flushall()
            return "FLUSHALL"
        for key in self.client.scan_iter(match=f"{{{self.prefix}}}:*"):
            self.client.delete(key)
        return "the keys of this demo are deleted"

    def loaded(self) -> bool:
        """Return whether Redis has been filled up to its horizon."""
        loaded, horizon = self.client.hmget(self.keys.meta, "loaded", "horizon")
        return loaded is not None and horizon is not None and int(loaded) >= int(horizon)


def about(message: Message) -> str:
    """Return the order or the reader that a message is about."""
    payload = message.payload or {}
    if "order" in payload:
        return f"order {payload['order']}"
    return str(payload["email"].split("@")[0])


def spread(seconds: list[float]) -> str:
    """Return percentiles in milliseconds, in words."""
    if not seconds:
        return "-"
    ms = sorted(1000 * value for value in seconds)
    p95 = ms[min(len(ms) - 1, int(len(ms) * 0.95))]
    return f"p50 {statistics.median(ms):.1f} ms, p95 {p95:.1f} ms, max {ms[-1]:.1f} ms"


def _print(text: str, style: str = "") -> None:
    if style and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{style}m{text}\x1b[0m"
    print(text, flush=True)
