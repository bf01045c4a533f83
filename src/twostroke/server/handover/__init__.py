"""Prompts that another engine computes, and the way of their keys and values from there."""
