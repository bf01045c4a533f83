"""Run by llama.cpp's own interpreter: takes a JSON request and answers with one line, FOUND and JSON.

``ids``: tokens whose logits are saved beside the file; ``n_greedy``: tokens to generate after them. ``texts``: to be encoded,
special tokens not parsed, begin of text added where the file asks for it. ``quantise``: {"to": file, "type": number of the
mix}.
"""

import ctypes
import json
import os
import sys

import llama_cpp as lc
import numpy as np


@lc.llama_log_callback
def quiet(level, text, data):
    if level >= 3:
        sys.stderr.write(text.decode("utf-8", "replace"))


def evaluate(model, ids, n_greedy):
    options = lc.llama_context_default_params()
    options.n_ctx = len(ids) + n_greedy + 8
    options.n_batch = options.n_ubatch = len(ids)
    options.n_threads = options.n_threads_batch = 2
    options.flash_attn_type = 0
    options.type_k = options.type_v = 0  # fp32, as ours
    context = lc.llama_init_from_model(model, options)
    n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    batch = lc.llama_batch_init(len(ids), 0, 1)

    def step(tokens, start):
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, start + i, 1, 0, True
        assert lc.llama_decode(context, batch) == 0
        rows = [lc.llama_get_logits_ith(context, i) for i in range(len(tokens))]
        return np.stack(
            [np.ctypeslib.as_array(ctypes.cast(r, ctypes.POINTER(ctypes.c_float)), (n_vocab,)).copy() for r in rows]
        )

    logits = step(ids, 0)
    greedy, last = [], logits[-1]
    for i in range(n_greedy):
        greedy.append(int(last.argmax()))
        last = step(greedy[-1:], len(ids) + i)[-1]
    lc.llama_free(context)
    return logits, greedy


def encode(model, text):
    raw = text.encode()
    room = (lc.llama_token * (len(raw) + 16))()
    n = lc.llama_tokenize(lc.llama_model_get_vocab(model), raw, len(raw), room, len(room), True, False)
    assert n >= 0, n
    return list(room[:n])


def quantise(source, to, number):
    options = lc.llama_model_quantize_default_params()
    options.nthread, options.ftype = 2, number
    assert lc.llama_model_quantize(source.encode(), to.encode(), ctypes.byref(options)) == 0


def main():
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    lc.llama_backend_init()
    asked = json.loads(sys.argv[1])
    found = {}
    if "quantise" in asked:
        q = asked["quantise"]
        quantise(asked["file"], q["to"], q["type"])
    if "ids" in asked or "texts" in asked:
        options = lc.llama_model_default_params()
        options.use_extra_bufts = False
        model = lc.llama_model_load_from_file(os.fsencode(asked["file"]), options)
        assert model, "the model was not loaded"
        if "ids" in asked:
            logits, found["greedy"] = evaluate(model, asked["ids"], asked.get("n_greedy", 0))
            found["logits"] = asked["file"] + ".npy"
            np.save(found["logits"], logits)
        found["ids"] = [encode(model, text) for text in asked.get("texts", ())]
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
