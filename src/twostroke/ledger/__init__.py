"""Predictions and measurements of every run in one record schema: an append-only SQLite store, scoring, text.

It imports the standard library only.
"""
