"""Requests, the token-budget scheduler, the page pool and the prefix tree. Standard library only: a step is plain data."""
