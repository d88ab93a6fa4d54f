"""Helpers of the tests. This is the index: what you want to do, and the module that does it.

Bring a message into a state, and read what is there
    ``steps``: schedule, claim, fail a message without a worker, and read its rows
    ``claims``: claimed messages, as a worker's parts get them
    ``record_of``: questions to the record; ``in_redis``: questions to Redis, past the broker
    ``limits``: topics with limits, claimed and ended step by step; ``limits_oracle``: judges limits by the log alone
    ``from_sql``: schedule and cancel by the functions of the database
    ``rows``: rows that a test changes past the guard of their model, and the columns of tables
    ``no_handlers``: a process without handlers; ``tuning``: other numbers for the time of a test
    ``referring``: a table of a project's own with a foreign key to messages
    ``bad_day``: an installation in which all happens at once that the console can tell

Run a worker
    ``workers``: ``run_delayq`` as a real process, that is stopped, killed and frozen; ``eventually``
    ``processes``: fixtures with such workers; ``worker_settings``: their settings; ``parent``: they end with the test
    ``assembled``: the parts of a worker in the test's own process, for the seams between them
    ``commands``: other commands, as an operator types them
    ``forks``: processes that a test forks and kills

Races, and what goes wrong
    ``together``: threads with connections of their own that begin at the same moment
    ``transactions``: transactions and table locks that stay open as long as a test needs them, or look old
    ``failpoints``: named places in the code at which a process dies, freezes, waits or fails
    ``proxy``: a bad network before a server; ``tls``: a certificate authority and a TLS front
    ``names`` and ``names_settings``: a name server that says nothing; ``many_files_settings``: many open files
    ``refused_threads``: threads that the system refuses
    ``broken_statements``: statements that fail as when the connection breaks
    ``chains``: a handler that hands its key over just when somebody acts by that key
    ``clocks``: the clock that a test gives a broker; ``skewed``: a Redis with a wrong clock
    ``replica``: an alias that only reads; ``other_vendor``: a database that cannot keep messages
    ``hostile``: an app of handlers that attack their worker

Redis
    ``the_redis``: fixtures with the Redis of the run; ``without_redis``: in its place where the packages are missing
    ``redis_servers``: servers of a test's own; ``redis_cluster``: nodes of a Redis Cluster
    ``sentinel`` and ``sentinel_settings``: an alias behind a Sentinel
    ``open_connections``: asks after each test for database connections that nobody can close any more
    ``late_puts``: a plugin that finds the tests which look into Redis before a put has come
    ``broker_methods``: a call of each method that asks Redis; ``known_scripts``: scripts whose reply gets lost were run

Count and listen
    ``statements``: the statements that the database gets; ``receivers``: receivers of signals
    ``middlewares``: middleware around the handlers
    ``metrics``: a worker's metrics, as Prometheus reads them; ``telemetry_settings``: Sentry and OpenTelemetry
"""
