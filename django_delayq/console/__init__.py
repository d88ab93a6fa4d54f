"""The console: a Django app on top of the queue, with admin pages, search, statistics, operations and audit."""
