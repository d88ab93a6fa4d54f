"""What all threads of a worker use: connections, the switch of brokers, shared memory, services, the log."""
