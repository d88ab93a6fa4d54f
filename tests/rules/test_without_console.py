"""The queue alone: without the console it migrates, delivers, restores and reports, and imports none of it."""

from __future__ import annotations

import os
from pathlib import Path

import redis

from .sources import SET_UP, report_of

PROGRAM = (
    SET_UP
    + """
import django_delayq.worker.processes.process

schedule_message("t.tx", delay=0)
schedule_message("t.tx", delay=3600)
report = {
    "once": run("run_delayq", "--once"),
    "stats": json.loads(run("delayq_stats", "--json")),
    "text": run("delayq_stats"),
    "restore": run("delayq_restore", "--dry-run"),
    "verify": run("delayq_check", "redis"),
    "states": sorted(Message.objects.values_list("state", flat=True)),
    "console": sorted(name for name in sys.modules if name.startswith("django_delayq.console")),
}
sys.__stdout__.write(json.dumps(report))
"""
)


def test_the_queue_works_without_the_console(redis_client: redis.Redis, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "DELAYQ_TEST_CONSOLE": "0",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "SQLITE_PATH": str(tmp_path / "alone.sqlite3"),
    }
    environment.pop("DATABASE_URL", None)
    report = report_of(PROGRAM, environment)
    assert report["once"] == "1 delivered\n"
    assert report["states"] == ["consumed", "scheduled"]
    assert report["stats"]["states"]["scheduled"]["count"] == 1
    assert report["stats"]["redis"]["reachable"] is True
    assert "Coming hour" not in report["text"]
    assert "default" in report["restore"]
    assert report["console"] == []
