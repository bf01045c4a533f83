"""What a model's passes ask of any machine: parameters, bytes, operations."""
