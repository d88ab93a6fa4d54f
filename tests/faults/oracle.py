"""The verdict on a queue after a fault, given when all of its messages are finished."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from django.db.models import QuerySet

from django_delayq.core.states import State, is_legal
from django_delayq.models import Message, Transition
from tests.app.models import Effect
from tests.support.record_of import is_early

TRANSACTIONAL = "t.tx"
# The reasons in the log of a delivery that crashed.
DEATH = "worker process died"
EXPIRY = "lease ran out"

# The window through which the effect of a delivery that ended for this reason may come again. W1: death between the
# effect and its record. W2: the lease ran out meanwhile.
Windows = Mapping[str, str]
SHUT: Windows = {}
KILLED: Windows = {DEATH: "W1"}
# After a power cut no supervisor sees the death.
POWER_CUT: Windows = {EXPIRY: "W1"}
LATE: Windows = {EXPIRY: "W2"}

# A message and one of its deliveries.
Delivery = tuple[int, int]


@dataclass
class Verdict:
    """The number of messages, the effects that came more than once by their window, and everything that is wrong."""

    messages: int = 0
    w1: int = 0
    w2: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.wrong:
            return f"FAILED: {self.wrong[0]}" + (f" (+{len(self.wrong) - 1})" if len(self.wrong) > 1 else "")
        excused = [f"{name} {count}" for name, count in (("W1", self.w1), ("W2", self.w2)) if count]
        return ", ".join(["ok", *excused])


def judge(
    queue: str, number: int, lines: Path, *, windows: Windows = SHUT, victim: str = "", failures: int = 0
) -> Verdict:
    """Judge all that happened in a queue.

    ``number``: how many messages were committed. ``lines``: the file of effects outside the database. ``windows``:
    those that were open, and in deliveries of which worker: any whose name holds ``victim``. ``failures``: how many
    handlers failed after such an effect, which is what a retry then repeats.
    """
    messages = list(Message.objects.filter(queue=queue))
    logs: dict[int, list[Transition]] = defaultdict(list)
    for row in Transition.objects.filter(message__queue=queue):
        logs[row.message_id].append(row)
    verdict = Verdict(len(messages))
    if len(messages) != number:
        verdict.wrong.append(f"{len(messages)} messages, {number} were committed")
    for message in messages:
        if message.state != State.CONSUMED:
            verdict.wrong.append(f"{message} is {message.state}")
        verdict.wrong += [f"{message}: {what}" for what in illegal(message, logs[message.pk])]
    verdict.wrong += early_effects(messages, logs)
    effects = Counter(effects_of(messages)) + Counter(lines_of(lines))
    excuses = {pk: _excuses(log, windows, victim) for pk, log in logs.items()}
    _judge_effects(verdict, messages, effects, excuses, failures)
    return verdict


def _excuses(log: list[Transition], windows: Windows, victim: str) -> dict[int, str]:
    """Return the deliveries in which a window was open, with its name."""
    victims = {row.delivery for row in log if row.to_state == State.RUNNING and victim in row.actor}
    return {
        row.delivery: window
        for row in log
        for ending, window in windows.items()
        if row.delivery in victims and row.reason.startswith(ending)
    }


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


def _judge_effects(
    verdict: Verdict,
    messages: list[Message],
    effects: Counter[Delivery],
    excuses: dict[int, dict[int, str]],
    failures: int,
) -> None:
    topics = {message.pk: message.topic for message in messages}
    by_message: dict[int, list[int]] = defaultdict(list)
    for (pk, delivery), count in effects.items():
        if pk not in topics:
            verdict.wrong.append(f"an effect of message {pk}, which was never committed")
        by_message[pk] += [delivery] * count
    for pk, topic in topics.items():
        deliveries = by_message[pk]
        if not deliveries:
            verdict.wrong.append(f"{topic} #{pk} had no effect")
        if topic == TRANSACTIONAL:
            if len(deliveries) > 1:
                verdict.wrong.append(f"{topic} #{pk} had its effect in each of the deliveries {deliveries}")
            continue
        # One effect in each delivery with an open window, and one in all the others together.
        open_ = Counter(window for delivery, window in excuses[pk].items() if delivery in deliveries)
        unexcused = len(deliveries) - open_.total()
        if unexcused > 1:
            failures -= unexcused - 1
        extra = max(0, len(deliveries) - 1)
        w1 = min(open_["W1"], extra)
        verdict.w1 += w1
        verdict.w2 += min(open_["W2"], extra - w1)
    if failures < 0:
        verdict.wrong.append(f"{-failures} effects more than the windows excuse")
