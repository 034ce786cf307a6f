"""The format of events in a segment, and how to read it."""
