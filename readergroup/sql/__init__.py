"""Databases of the application."""
