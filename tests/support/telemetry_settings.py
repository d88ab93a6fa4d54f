"""The settings of ``tests.support.worker_settings`` with Sentry and OpenTelemetry, as a project sets them up.

What they send goes to files in the folder that DELAYQ_TEST_TELEMETRY names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import sentry_sdk
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from sentry_sdk.transport import Transport

from django_delayq.contrib.opentelemetry import DelayqInstrumentor
from django_delayq.contrib.sentry import DelayqIntegration
from tests.support.worker_settings import *  # noqa: F403

_FOLDER = Path(os.environ["DELAYQ_TEST_TELEMETRY"])


class _File(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        with (_FOLDER / "sentry").open("a") as file:
            file.writelines(json.dumps([item.type, item.payload.json]) + "\n" for item in envelope.items)


sentry_sdk.init(
    dsn="http://public@127.0.0.1:9/1",
    transport=_File(),
    integrations=[DelayqIntegration()],
    auto_enabling_integrations=False,
    traces_sample_rate=1.0,
)
_provider = TracerProvider()
# Spans wait for the end of the worker.
_provider.add_span_processor(
    BatchSpanProcessor(
        ConsoleSpanExporter(
            out=(_FOLDER / "spans").open("a"), formatter=lambda span: f"{json.dumps(json.loads(span.to_json()))}\n"
        ),
        schedule_delay_millis=600_000,
    )
)
DelayqInstrumentor().instrument(tracer_provider=_provider)
