"""Text in, token batches out: sources, tokenizer, chat templates, preparation into shards, packing, loader with exact state."""
