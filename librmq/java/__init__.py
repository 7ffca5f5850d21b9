"""Java's arithmetic, hashes and JSON, exactly."""
