"""Models of other tools: GGUF, llama2.c and Hugging Face directories come in as Hugging Face directories in our spelling."""
