"""A soak: processes send and consume while they are killed and cut off; then their history is judged."""
