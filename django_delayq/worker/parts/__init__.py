"""What the parts of a worker share: deliveries, connections, locks, reports and the log."""
