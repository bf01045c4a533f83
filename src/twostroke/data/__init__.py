"""From text to token batches: sources, tokenizer, chat templates, preparation into shards, packing, loader with exact state."""
