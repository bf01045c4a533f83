"""How good a model is: bits per byte, perplexity and tasks through either engine, and two models compared pairwise."""
