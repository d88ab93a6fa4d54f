"""One worker process: how it ends."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from django_delayq.core.worker_options import Options
from django_delayq.worker.processes.process import BROKEN, OnceProcess, WorkerProcess
from django_delayq.worker.run.recorder import Recorder
from tests.support.claims import DB

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_process_that_has_lost_a_thread_ends_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recorder, "run", lambda self: None)
    process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0))
    assert process.run() == BROKEN
    assert "delayq-recorder has died" in caplog.text


def test_a_process_that_has_ended_leaves_no_file_open() -> None:
    def run() -> int:
        process = WorkerProcess(Options(DB, threads=1, graceful_timeout=0))
        threading.Timer(0.2, process.stop).start()
        assert process.run() == 0
        del process
        gc.collect()
        return len(os.listdir("/dev/fd"))

    first = run()
    assert run() <= first


def test_a_consumer_that_ends_between_two_looks_of_its_process_has_not_died(caplog: pytest.LogCaptureFixture) -> None:
    class Late(OnceProcess):
        looked = False

        def _is_over(self) -> bool:
            # The first look comes just before the end of the consumer.
            looked, self.looked = self.looked, True
            self.parts.consumer.join()
            return looked and super()._is_over()

    assert Late(Options(DB, threads=1)).run() == 0
    assert "has died" not in caplog.text
