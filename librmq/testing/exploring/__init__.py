"""The explorer: a runner that decides differently in each run of a test, and the search for the shortest failure."""
