"""Batches in OpenAI's format: lines of requests to files of answers, by ``twostroke batch`` and by ``/v1/batches``."""
