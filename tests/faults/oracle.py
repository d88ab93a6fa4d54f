"""The verdict on a queue after a fault, given when all of its messages are finished."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from django.db.models import QuerySet

from django_delayq.core.states import State, is_legal
from django_delayq.models import Message, Transition
from tests.app.models import Effect
from tests.support.record_of import is_early

TRANSACTIONAL = "t.tx"

# The windows that are open, each by the reason in the log of a delivery whose effect may then come again. W1: death
# between the effect and its record, which no supervisor sees after a power cut. W2: the lease ran out meanwhile.
SHUT: tuple[str, ...] = ()
DIED = ("worker process died",)
RAN_OUT = ("lease ran out",)

# A message and one of its deliveries.
Delivery = tuple[int, int]


def judge(
    queue: str, number: int, lines: Path, *, windows: tuple[str, ...] = SHUT, victim: str = "", failures: int = 0
) -> list[str]:
    """Return everything that is wrong with what happened in a queue.

    ``number``: how many messages were committed. ``lines``: the file of effects outside the database. ``windows``:
    those that were open, and in deliveries of which worker: any whose name holds ``victim``. ``failures``: how many
    handlers failed after such an effect, which is what a retry then repeats.
    """
    messages = list(Message.objects.filter(queue=queue))
    logs: dict[int, list[Transition]] = defaultdict(list)
    for row in Transition.objects.filter(message__queue=queue):
        logs[row.message_id].append(row)
    wrong = []
    if len(messages) != number:
        wrong.append(f"{len(messages)} messages, {number} were committed")
    for message in messages:
        if message.state != State.CONSUMED:
            wrong.append(f"{message} is {message.state}")
        wrong += [f"{message}: {what}" for what in illegal(message, logs[message.pk])]
    wrong += early_effects(messages, logs)
    effects = Counter(effects_of(messages)) + Counter(lines_of(lines))
    excused = {pk: _excused(log, windows, victim) for pk, log in logs.items()}
    return wrong + _strange_effects(messages, effects, excused, failures)


def _excused(log: list[Transition], windows: tuple[str, ...], victim: str) -> set[int]:
    """Return the deliveries in which a window was open."""
    victims = {row.delivery for row in log if row.to_state == State.RUNNING and victim in row.actor}
    return {row.delivery for row in log if row.delivery in victims and row.reason.startswith(windows)}


def effects_of(messages: Iterable[Message]) -> list[Delivery]:
    return list(_effects(messages).values_list("message_id", "delivery"))


def _effects(messages: Iterable[Message]) -> QuerySet[Effect]:
    return Effect.objects.filter(message_id__in=[m.pk for m in messages], delivery__gt=0)


def early_effects(messages: Iterable[Message], logs: Mapping[int, list[Transition]]) -> list[str]:
    """Return the effects that came before their message was due, when its handler may not begin yet."""
    dues = {(pk, row.delivery): row.due_at for pk, log in logs.items() for row in log if row.to_state == State.RUNNING}
    return [
        f"an effect before it was due: {effect}"
        for effect in _effects(messages)
        if effect.at < dues.get((effect.message_id, effect.delivery), effect.at)
    ]


def lines_of(path: Path) -> list[Delivery]:
    if not path.exists():
        return []
    pairs = (line.split() for line in path.read_text().splitlines())
    return [(int(message), int(delivery)) for message, delivery in pairs]


def illegal(message: Message, log: list[Transition]) -> list[str]:
    """Return what is wrong with the log of a message."""
    wrong = no_path(message, log)
    claims = [row for row in log if row.to_state == State.RUNNING]
    if [row.delivery for row in claims] != list(range(1, message.deliveries + 1)):
        wrong.append(f"claims {[row.delivery for row in claims]} for {message.deliveries} deliveries")
    return wrong + [f"delivery {row.delivery} started early" for row in claims if is_early(row)]


def no_path(message: Message, log: list[Transition]) -> list[str]:
    """Return where the log is no path from the message's first state to its present one: a gap, or a wrong step."""
    wrong = []
    before: str | None = None
    if [row.number for row in log] != list(range(1, message.moves + 1)):
        wrong.append(f"numbers {[row.number for row in log]} for {message.moves} moves")
    for row in log:
        if row.from_state != before:
            wrong.append(f"move {row.number} is from {row.from_state}, after {before}")
        if not is_legal(None if before is None else State(before), State(row.to_state)):
            wrong.append(f"move {row.number}: {before} to {row.to_state}")
        before = row.to_state
    if before != message.state:
        wrong.append(f"ends {before}, is {message.state}")
    return wrong


def _strange_effects(
    messages: list[Message], effects: Counter[Delivery], excused: Mapping[int, Collection[int]], failures: int
) -> list[str]:
    wrong = []
    by_message: dict[int, list[int]] = {message.pk: [] for message in messages}
    for (pk, delivery), count in effects.items():
        if pk not in by_message:
            wrong.append(f"an effect of message {pk}, which was never committed")
        else:
            by_message[pk] += [delivery] * count
    for message in messages:
        deliveries = by_message[message.pk]
        if not deliveries:
            wrong.append(f"{message} had no effect")
        if message.topic == TRANSACTIONAL:
            if len(deliveries) > 1:
                wrong.append(f"{message} had its effect in each of the deliveries {deliveries}")
            continue
        # One effect in each delivery with an open window, and one in all the others together.
        unexcused = len(deliveries) - len(set(deliveries) & set(excused[message.pk]))
        failures -= max(0, unexcused - 1)
    if failures < 0:
        wrong.append(f"{-failures} effects more than the windows excuse")
    return wrong
