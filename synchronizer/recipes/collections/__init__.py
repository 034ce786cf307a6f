"""Shared maps, sets, counters and configuration."""
