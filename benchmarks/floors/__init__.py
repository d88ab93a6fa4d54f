"""What the servers can do with nothing of ours on top: the adapters of the three floors."""
