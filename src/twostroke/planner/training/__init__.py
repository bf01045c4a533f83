"""What a training run takes: memory, seconds, traffic, on one device or cut over many."""
