"""A queue of events, its consumers, and its dead letters."""
