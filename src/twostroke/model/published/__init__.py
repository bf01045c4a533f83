"""Quantised checkpoints as other tools publish them: one file a method, one class a way to store a matrix. No torch to plan."""
