"""Requests, the token-budget scheduler, the page pool and the prefix tree. A step is plain data; nothing imports torch."""
