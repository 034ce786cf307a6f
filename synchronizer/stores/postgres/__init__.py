"""Segments in a PostgreSQL database."""
