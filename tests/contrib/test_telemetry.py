"""A worker process tells Sentry, OpenTelemetry and its terminal what its handlers raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from django_delayq import schedule_message
from django_delayq.core.states import State
from tests.support.processes import Start
from tests.support.record_of import wait_until

pytest.importorskip("sentry_sdk")
pytest.importorskip("opentelemetry.sdk")

SETTINGS = "env DJANGO_SETTINGS_MODULE=tests.support.telemetry_settings DELAYQ_TEST_TELEMETRY="


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_worker_reports_its_failures_and_sends_all_before_it_ends(start: Start, tmp_path: Path) -> None:
    worker = start("-v", "2", prefix=f"{SETTINGS}{tmp_path}")
    message = wait_until(schedule_message("t.fail"), State.DEAD)
    wait_until(schedule_message("t.ok"), State.CONSUMED)
    worker.wait_for("message dead")
    assert worker.stop() == 0
    sent = lines(tmp_path / "sentry")
    (event,) = [payload for kind, payload in sent if kind == "event"]
    assert event["exception"]["values"][-1]["stacktrace"]["frames"][-1]["function"] == "fail"
    assert [crumb["category"] for crumb in event["breadcrumbs"]["values"]].count("delayq") == 2
    assert len([kind for kind, _payload in sent if kind == "transaction"]) == 4
    spans = [span for span in lines(tmp_path / "spans") if span["name"] == "process t.fail"]
    assert [span["attributes"]["delayq.outcome"] for span in spans] == ["retried", "retried", "dead"]
    assert {span["attributes"]["messaging.message.id"] for span in spans} == {str(message.pk)}
    # The terminal: the traceback of each attempt.
    assert worker.count("RuntimeError: it never works") == 3
    assert worker.count(r"in fail$") == 3
