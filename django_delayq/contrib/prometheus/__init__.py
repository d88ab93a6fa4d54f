"""Serves the metrics of a worker to Prometheus: ``run_delayq --metrics-port``, by prometheus_client.

Each process counts in memory that all processes of the worker share (``counts.py``). Any of them answers a scrape for
all (``server.py``), with gauges that it reads from the record and Redis at that moment.
"""
