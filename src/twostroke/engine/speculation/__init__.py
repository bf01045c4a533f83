"""Drafts of tokens that a step checks: where they come from, and how many of them pay."""
