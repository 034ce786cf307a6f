"""Reads streams in bulk: ranges between two cuts, in any order and in any number of processes."""
