"""Reads shared states without the programs that have them: their kinds, values, and the updates in their logs."""
