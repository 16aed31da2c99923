"""Starts ranks and follows them to their end."""
