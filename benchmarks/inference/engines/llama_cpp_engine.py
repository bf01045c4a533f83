"""llama.cpp through llama-cpp-python's low-level interface. ``variant``: f16, q8_0, q4_0, each also with ``-plain``: without
the extra buffer types (weights repacked for AMX and the like)."""

from __future__ import annotations

import ctypes
import os

from protocol import Bench, arguments, timed


def main() -> None:
    args = arguments()
    bench = Bench(args)
    import llama_cpp as lc

    lc.llama_backend_init()
    options = lc.llama_model_default_params()
    if args.variant.endswith("-plain"):
        options.use_extra_bufts = False
    model = lc.llama_model_load_from_file(os.fsencode(args.model), options)
    if not model:
        raise SystemExit("the model was not loaded")
    largest = max(*args.batches, 1)
    context_options = lc.llama_context_default_params()
    context_options.n_ctx = largest * 192 + 640
    context_options.n_batch = context_options.n_ubatch = 2048
    context_options.n_seq_max = largest
    context_options.kv_unified = True
    context_options.n_threads = context_options.n_threads_batch = 2
    context = lc.llama_init_from_model(model, context_options)
    n_vocab = args.vocab_size
    batch = lc.llama_batch_init(4096, 0, 1)

    def compute(rows: list[tuple[int, int, int, bool]]) -> None:
        """One call on (token, position, sequence, whether logits are wanted) rows."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if lc.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    import numpy as np

    def best(row: int) -> int:
        pointer = lc.llama_get_logits_ith(context, row)
        values = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape=(n_vocab,))
        return int(values.argmax())

    def answer(prompts: list[list[int]], n_output: int) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        compute(rows)
        tokens = [best(i) for i, row in enumerate(rows) if row[3]]
        for step in range(1, n_output):
            compute([(token, len(prompts[s]) + step - 1, s, True) for s, token in enumerate(tokens)])
            tokens = [best(i) for i in range(len(tokens))]

    def generate(prompts: list[list[int]], n_output: int) -> float:
        return timed(lambda: answer(prompts, n_output))

    bench.first_token(generate)
    bench.run(generate)


if __name__ == "__main__":
    main()
