"""Takes and claims messages for this process."""
