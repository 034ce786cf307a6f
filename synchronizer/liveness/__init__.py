"""Leases, and what they decide: who is alive, and which process of many acts."""
