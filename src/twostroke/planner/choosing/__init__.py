"""Choosing among plans: search, comparison, crossover, what would fit."""
