"""The model definition: one decoder for every family, its weights by name, and model directories on disk."""
