"""The inference engine: lowering, KV pool, interpreter, sampler, core loop, ``LLM``. Importing this package imports nothing."""
