"""Operations: a bulk action, restore or check that a worker does in steps. It outlives page, web server and worker."""
