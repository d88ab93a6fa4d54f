"""The processes of a worker: the supervisor and its children."""
