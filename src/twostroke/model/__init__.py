"""What a model computes: one decoder for every family, and how its weights are named and kept on disk."""
