"""What a prediction is worth: its formula, its interval, its score in the ledger."""
