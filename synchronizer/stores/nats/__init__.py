"""Segments in NATS JetStream."""
