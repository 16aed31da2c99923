"""Attacks: what others who share a machine or a network, or damaged files, may try."""
