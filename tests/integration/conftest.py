"""What tests of the seams between the roles share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_delayq.extensions import WorkerExtensions
from django_delayq.worker.recorder import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder("default", lambda count: None, WorkerExtensions("default", "w"))
    made.start()
    yield made
    made.stop()
    made.join(10)
