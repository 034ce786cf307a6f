"""Transactions: staged, committed, merged."""
