"""Streams: ordered by routing key, partitioned into segments, scaled while writers and readers run."""
