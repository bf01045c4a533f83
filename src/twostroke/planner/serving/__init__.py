"""What serving takes: memory, seconds of prefill and decode, waiting beside others."""
