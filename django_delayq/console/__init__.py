"""The console: admin pages, search, statistics, operations and audit. A Django app that stands on the queue."""
