"""The worker process of ``data.background``: ``python -m twostroke.data.batch_worker``.

It reads the description of its builder (one line of JSON), then requests, and answers each. It ends at the end of its input,
so it also ends when the training process is killed.

    request   int64: n_rows, n_entries, width; then n_entries × width of int64
    answer    int64: n_valid; then tokens, targets, positions (int64) and documents (int32), (n_rows, T) each;
              or −1, the length of a sentence, and the sentence
"""

from __future__ import annotations

import json
import sys
from typing import BinaryIO

import numpy as np

from twostroke.data.rows import builder_of


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    builder = builder_of(json.loads(requests.readline()))
    while header := requests.read(24):
        n_rows, n_entries, width = np.frombuffer(header, dtype=np.int64).tolist()
        request = np.frombuffer(requests.read(8 * n_entries * width), dtype=np.int64).reshape(n_entries, width)
        try:
            rows = builder.build(request, n_rows)
        except (OSError, ValueError, IndexError) as error:
            sentence = f"{type(error).__name__}: {error}".encode()
            answers.write(np.array([-1, len(sentence)], dtype=np.int64).tobytes() + sentence)
        else:
            answers.write(np.int64(rows.n_valid).tobytes())
            for array in (rows.tokens, rows.targets, rows.positions, rows.documents):
                answers.write(np.ascontiguousarray(array).data)
        answers.flush()


if __name__ == "__main__":
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        sys.stderr.close()  # the training process has ended
