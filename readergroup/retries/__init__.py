"""Keeps events that failed until their next attempt is due, and returns them to the group."""
