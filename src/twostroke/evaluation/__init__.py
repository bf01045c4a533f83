"""How good a model is: bits per byte and perplexity on held-out text, and two models compared on the same text."""
