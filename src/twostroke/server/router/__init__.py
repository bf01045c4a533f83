"""A router before any servers that speak OpenAI's interface."""
