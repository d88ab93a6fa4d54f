"""The producer of a torture begins one chain in each run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from django_delayq.models import Message
from tests.torture.producer import Producer, RunIsOver


def test_a_producer_that_comes_late_begins_no_second_chain(
    transactional_db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journals").mkdir()
    monkeypatch.setenv("TORTURE_DIR", str(tmp_path))
    late = Producer("1", rate=1, spread=1, poison=0, queues=1, until=time.time())
    with pytest.raises(RunIsOver):
        late.produce()
    assert not Message.objects.exists()
