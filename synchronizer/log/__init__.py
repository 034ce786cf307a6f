"""The log of typed updates under a shared state: entries, the copy that each process keeps, and how it is written."""
