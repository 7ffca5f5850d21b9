"""Read a store that another process writes."""
