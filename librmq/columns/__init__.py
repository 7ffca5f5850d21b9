"""A store as Arrow record batches."""
