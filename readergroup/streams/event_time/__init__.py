"""The event time of a stream: what its writers note, and the watermark that follows from it."""
