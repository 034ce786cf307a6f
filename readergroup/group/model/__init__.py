"""The state of a reader group and its updates. Pure: no I/O, no clock, no threads."""
