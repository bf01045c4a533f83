"""Rent, energy and what vendors ask for tokens."""
