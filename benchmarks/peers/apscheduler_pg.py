"""The adapter of APScheduler with its job store in PostgreSQL. ``python -m apscheduler_pg`` runs its scheduler."""

from __future__ import annotations

import os

from adapter_process import mark
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler

URL = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
# A run for each time, also of those that were missed.
DEFAULTS = {"coalesce": False, "misfire_grace_time": None}
TABLES = ["apscheduler_jobs"]


def job():
    """Do nothing."""


def make(kind):
    return kind(jobstores={"default": SQLAlchemyJobStore(url=URL)}, job_defaults=DEFAULTS, timezone="UTC")


def setup():
    recur(0)


def recur(number):
    scheduler = make(BackgroundScheduler)
    scheduler.start(paused=True)
    for n in range(number):
        scheduler.add_job(job, "cron", second="*", id=str(n))
    scheduler.shutdown()


def worker():
    return ["-m", "apscheduler_pg"]


def main():
    scheduler = make(BlockingScheduler)
    # A job is not told the time for which it stands, but those who listen are.
    scheduler.add_listener(
        lambda event: mark({"n": int(event.job_id), "due": event.scheduled_run_time.timestamp()}), EVENT_JOB_EXECUTED
    )
    scheduler.start()


if __name__ == "__main__":
    main()
