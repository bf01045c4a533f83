"""Pages of the KV cache outside of its pool: kept in a file for later requests and later starts, or saved as a session."""
