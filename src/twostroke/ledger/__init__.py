"""One record schema for predictions and measurements of every run: an append-only SQLite store, scoring, text.

Standard library only.
"""
