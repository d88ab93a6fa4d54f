"""What says when: Redis, or the database when there is none."""
