"""What a report says, as values: one pass over the messages of each store, the findings, and a comparison."""
