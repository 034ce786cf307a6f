"""Membership, leader election, locks, semaphores and barriers."""
