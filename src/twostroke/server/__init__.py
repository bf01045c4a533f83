"""OpenAI-compatible serving: HTTP in one process, which has no torch, and the engine in another behind a Unix socket."""
