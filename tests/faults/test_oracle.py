"""The oracle of the fault matrix sees each kind of fault in a record that was spoiled by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from django_delayq.models import Message
from django_delayq.models.messages import LogRow
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success, Ticket
from tests.app.models import Effect
from tests.support.record_of import write_out_log
from tests.support.rows import unguarded

from .messages import NUMBER, schedule_all
from .oracle import DIED, RAN_OUT, SHUT, TRANSACTIONAL, judge

pytestmark = pytest.mark.django_db(transaction=True)

Corruption = Callable[[Path], object]


def deliver(lines: Path) -> None:
    """Deliver messages by hand, without a fault."""
    messages = schedule_all("good", str(lines))
    unguarded(Message).update(due_at="2020-01-01T00:00:00Z")
    leases = {message.topic: 60.0 for message in messages}
    claimed = transitions.claim("default", [Ticket(m.pk) for m in messages], leases, "hand/1/0")
    for row in claimed:
        if row.topic == "t.file":
            with lines.open("a") as file:
                file.write(f"{row.id} 1\n")
        else:
            Effect.objects.create(message_id=row.id, delivery=1)
    transitions.succeed("default", [Success(row.id, 1, "hand") for row in claimed])
    write_out_log()


def some(topic: str) -> Message:
    return Message.objects.filter(topic=topic)[0]


def append(lines: Path, line: str) -> None:
    with lines.open("a") as file:
        file.write(line)


def test_a_right_record_has_no_findings(tmp_path: Path) -> None:
    deliver(tmp_path / "lines")
    assert judge("good", NUMBER, tmp_path / "lines") == []


@pytest.mark.parametrize(
    ("corrupt", "finding"),
    [
        (lambda lines: Effect.objects.filter(message_id=some(TRANSACTIONAL).pk).delete(), "had no effect"),
        (lambda lines: Effect.objects.create(message_id=some(TRANSACTIONAL).pk, delivery=2), "in each of the"),
        (lambda lines: lines.write_text("".join(lines.read_text().splitlines(True)[1:])), "had no effect"),
        (lambda lines: append(lines, lines.read_text().splitlines(True)[0]), "more than the windows excuse"),
        (lambda lines: append(lines, "999999999 1\n"), "never committed"),
        (lambda lines: unguarded(Message).filter(pk=some("t.file").pk).delete(), "19 messages, 20 were committed"),
        (lambda lines: unguarded(LogRow).filter(number=2).delete(), "numbers"),
        (lambda lines: unguarded(LogRow).filter(number=3).update(to_state="expired"), "running to expired"),
        (lambda lines: unguarded(LogRow).filter(number=3).update(to_state="expired"), "ends expired"),
        (lambda lines: unguarded(LogRow).filter(number=3).update(from_state="dead"), "is from dead"),
        (lambda lines: unguarded(LogRow).filter(number=2).update(at="2019-01-01T00:00:00Z"), "started early"),
        (lambda lines: Effect.objects.update(at="2019-01-01T00:00:00Z"), "before it was due"),
        (lambda lines: unguarded(Message).filter(topic="t.file").update(state="dead"), "is dead"),
        (lambda lines: unguarded(Message).filter(topic="t.file").update(deliveries=2), "for 2 deliveries"),
    ],
)
def test_a_corrupted_record_has_its_finding(tmp_path: Path, corrupt: Corruption, finding: str) -> None:
    lines = tmp_path / "lines"
    deliver(lines)
    corrupt(lines)
    assert any(finding in what for what in judge("good", NUMBER, lines))


@pytest.mark.parametrize(
    ("reason", "windows", "victim", "found"),
    [
        (DIED, DIED, "hand/1/", []),
        (RAN_OUT, RAN_OUT, "hand/1/", []),
        (RAN_OUT, SHUT, "", ["1 effects more than the windows excuse"]),
        (RAN_OUT, DIED, "", ["1 effects more than the windows excuse"]),
        (RAN_OUT, RAN_OUT, "/2/", ["1 effects more than the windows excuse"]),
    ],
)
def test_a_window_excuses_one_more_effect_where_its_reason_can_happen(
    tmp_path: Path, reason: tuple[str], windows: tuple[str, ...], victim: str, found: list[str]
) -> None:
    lines = tmp_path / "lines"
    deliver(lines)
    pk: int = some("t.file").pk
    unguarded(LogRow).filter(message_id=pk, number=3).update(reason=reason[0])
    append(lines, f"{pk} 2\n")
    assert judge("good", NUMBER, lines, windows=windows, victim=victim) == found
    append(lines, f"{pk} 2\n")
    assert judge("good", NUMBER, lines, windows=windows, victim=victim)
