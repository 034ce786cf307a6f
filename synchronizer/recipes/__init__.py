"""Ready-made recipes: shared collections, coordination of processes, and durable queues."""
