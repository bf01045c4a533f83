"""Matrix products and attention over few or many rows, each chosen by measurement and each with a plain reference."""
