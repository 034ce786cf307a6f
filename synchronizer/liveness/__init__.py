"""Liveness: which processes are alive (leases), and which one of many acts (exclusive roles)."""
