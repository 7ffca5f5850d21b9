"""Messages, the layout of their records, ids, batches and names of topics."""
