"""The oracle of the fault matrix sees each kind of fault in a record that was spoiled by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from django_delayq.models import Message
from django_delayq.models.record import LogRow
from django_delayq.record import transitions
from django_delayq.record.sql.rows import Success, Ticket
from tests.app.models import Effect
from tests.support.record_of import write_out_log

from .messages import NUMBER, schedule_all
from .oracle import DEATH, EXPIRY, KILLED, LATE, POWER_CUT, SHUT, TRANSACTIONAL, Verdict, Windows, judge

pytestmark = pytest.mark.django_db(transaction=True)

Corruption = Callable[[Path], object]


def deliver(lines: Path) -> None:
    """Deliver messages by hand, without a fault."""
    messages = schedule_all("good", str(lines))
    Message._base_manager.update(due_at="2020-01-01T00:00:00Z")
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
    assert judge("good", NUMBER, tmp_path / "lines") == Verdict(NUMBER)


@pytest.mark.parametrize(
    ("corrupt", "finding"),
    [
        (lambda lines: Effect.objects.filter(message_id=some(TRANSACTIONAL).pk).delete(), "had no effect"),
        (lambda lines: Effect.objects.create(message_id=some(TRANSACTIONAL).pk, delivery=2), "in each of the"),
        (lambda lines: lines.write_text("".join(lines.read_text().splitlines(True)[1:])), "had no effect"),
        (lambda lines: append(lines, lines.read_text().splitlines(True)[0]), "more than the windows excuse"),
        (lambda lines: append(lines, "999999999 1\n"), "never committed"),
        (lambda lines: Message._base_manager.filter(pk=some("t.file").pk).delete(), "19 messages, 20 were committed"),
        (
            lambda lines: LogRow._base_manager.filter(
                message_id=LogRow.objects.filter(number=2)[0].message_id, number=2
            ).delete(),
            "numbers",
        ),
        (lambda lines: LogRow._base_manager.filter(number=3).update(from_state="dead"), "is from dead"),
        (lambda lines: LogRow._base_manager.filter(number=2).update(at="2019-01-01T00:00:00Z"), "started early"),
        (lambda lines: Effect.objects.update(at="2019-01-01T00:00:00Z"), "before it was due"),
        (lambda lines: Message._base_manager.filter(topic="t.file").update(state="dead"), "is dead"),
        (lambda lines: Message._base_manager.filter(topic="t.file").update(deliveries=2), "for 2 deliveries"),
    ],
)
def test_a_corrupted_record_has_its_finding(tmp_path: Path, corrupt: Corruption, finding: str) -> None:
    lines = tmp_path / "lines"
    deliver(lines)
    corrupt(lines)
    assert any(finding in what for what in judge("good", NUMBER, lines).wrong)


@pytest.fixture
def repeat(tmp_path: Path) -> Callable[[str], int]:
    """Repeat one effect because of a delivery that ended with this reason."""

    def end(how: str) -> int:
        deliver(tmp_path / "lines")
        pk: int = some("t.file").pk
        LogRow._base_manager.filter(message_id=pk, number=3).update(reason=how)
        append(tmp_path / "lines", f"{pk} 2\n")
        return pk

    return end


@pytest.mark.parametrize(
    ("ending", "windows", "found"),
    [
        (DEATH, KILLED, Verdict(NUMBER, w1=1)),
        (EXPIRY, POWER_CUT, Verdict(NUMBER, w1=1)),
        (EXPIRY, LATE, Verdict(NUMBER, w2=1)),
    ],
)
def test_an_open_window_excuses_one_more_effect_and_not_two(
    tmp_path: Path, repeat: Callable[[str], int], ending: str, windows: Windows, found: Verdict
) -> None:
    lines = tmp_path / "lines"
    pk = repeat(ending)
    assert judge("good", NUMBER, lines, windows=windows, victim="hand/1/") == found
    append(lines, f"{pk} 2\n")
    assert judge("good", NUMBER, lines, windows=windows).wrong


@pytest.mark.parametrize(
    ("ending", "windows", "victim"),
    [(EXPIRY, SHUT, ""), (EXPIRY, KILLED, ""), (DEATH, LATE, ""), (DEATH, POWER_CUT, ""), (EXPIRY, LATE, "/2/")],
)
def test_the_log_excuses_nothing_where_its_reason_cannot_happen(
    tmp_path: Path, repeat: Callable[[str], int], ending: str, windows: Windows, victim: str
) -> None:
    repeat(ending)
    found = judge("good", NUMBER, tmp_path / "lines", windows=windows, victim=victim)
    assert found.wrong == ["1 effects more than the windows excuse"]
