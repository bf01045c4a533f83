"""Files made to exhaust memory or time: what reading one takes is at most twice its size and 64 MiB more than a sound one's.

Each is read in a child process of its own, whose peak of resident memory is compared with that of a child that reads a sound
file of the same kind. (The peak is ``VmHWM``: ``ru_maxrss`` begins with that of the process that was forked.)
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from subjects import SUBJECTS

import twostroke
from assets_folder import ASSETS

MiB = 2**20
SPARE_BYTES = 64 * MiB
MOST_CPU_S = 20.0  # of sixteen megabytes; the quadratic reader took hours

READ = """
import json, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import torch
torch.set_num_threads(1)
from subjects import SUBJECTS
from twostroke.core.errors import TwostrokeError
began, error = time.process_time(), None
try:
    SUBJECTS[sys.argv[1]].read(Path(sys.argv[2]))
except TwostrokeError as e:
    error = str(e)
took = time.process_time() - began
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([int(status["VmHWM"].split()[0]) * 1024, took, error]))
"""


def read_in_child(name: str, folder: Path) -> tuple[int, float, str | None]:
    """Peak of resident memory in bytes, CPU seconds, and the sentence if there was one."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": str(Path(twostroke.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ, name, str(folder), *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    peak, took, error = json.loads(done.stdout)
    return peak, took, error


def filled(pattern: str, n_bytes: int) -> bytes:
    return ",".join([pattern] * (n_bytes // (len(pattern) + 1))).encode()


def filled_lines(pattern: str, n: int) -> bytes:
    return "".join(f"\n{pattern % i}" for i in range(n)).encode()


def header(raw: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(raw)) + raw + data


def tiny_tensors(n: int) -> bytes:
    """A legal file of ``n`` tensors without an element: nothing but header."""
    entries = ",".join(f'"{i:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(n))
    return header(f"{{{entries}}}".encode())


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(*fields: bytes, n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(fields)) + b"".join(fields) + bytes(64)


def texts(n: int, length: int, kind: int = 8) -> bytes:
    return text(b"k") + struct.pack("<IIQ", 9, kind, n) + (text(b"x" * length) if kind == 8 else struct.pack("<IQ", 0, 0)) * n


def number(key: str, value: int) -> bytes:
    return text(key.encode()) + struct.pack("<II", 4, value)


def gguf_model(pieces: list[bytes], kind: int = 1) -> bytes:
    """A sound Llama of one layer and two dimensions, of ``pieces`` as its tokens, all of one ``kind``."""
    n = len(pieces)
    sizes = {"embedding_length": 2, "attention.head_count": 1, "feed_forward_length": 2, "block_count": 1, "context_length": 8}
    fields = [text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")]
    fields += [number(f"llama.{key}", value) for key, value in sizes.items()]
    fields.append(text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    fields.append(text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"llama"))
    fields.append(text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, n) + b"".join(map(text, pieces)))
    fields.append(text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, n) + bytes(4 * n))
    fields.append(text(b"tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, n) + struct.pack("<i", kind) * n)
    fields.append(text(b"tokenizer.ggml.add_bos_token") + struct.pack("<IB", 7, 0))
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (2, n), "output_norm": (2,), "blk.0.attn_norm": (2,), "blk.0.ffn_norm": (2,)}
    shapes |= {f"blk.0.{name}": (2, 2) for name in matrices}
    rows, offset = b"", 0
    for name, shape in shapes.items():
        rows += text(f"{name}.weight".encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 1, offset)
        offset += -(-2 * math.prod(shape) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields)) + b"".join(fields) + rows
    return head + bytes(-len(head) % 32 + offset)


def words(n: int) -> list[bytes]:
    """The first ``n`` words over two letters: each cut of each makes two others."""
    every = (word for length in itertools.count(1) for word in itertools.product(b"ab", repeat=length))
    return [bytes(word) for word in itertools.islice(every, n)]


EMOJI = "\U0001f600"
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a header of empty lists, 28 MiB": ("safetensors", lambda: header(b'{"a":[' + filled("[]", 28 * MiB) + b"]}")),
    "a header of empty lists, 15 MB": ("safetensors", lambda: header(b'{"a":[' + filled("[]", 15_000_000) + b"]}")),
    "a header of numbers": ("safetensors", lambda: header(b'{"a":[' + filled("257", 15_000_000) + b"]}")),
    "a header of one long name": ("safetensors", lambda: header(f'{{"{"a" * 15_000_000}{EMOJI}":1}}'.encode())),
    "a header that nests": ("safetensors", lambda: header(b"[" * 15_000_000)),
    "a header of tensors without elements": ("safetensors", lambda: tiny_tensors(240_000)),
    "an index of empty lists": ("index", lambda: b'{"weight_map":{"a":[' + filled("[]", 15_000_000) + b"]}}"),
    "an index of many names": ("index", lambda: ("{" + ",".join(f'"{i:x}":"a"' for i in range(900_000)) + "}").encode()),
    "a config of empty lists": ("model_config", lambda: b'{"a":[' + filled("[]", 4_000_000) + b"]}"),
    "a config of small objects": ("model_config", lambda: b'{"a":[' + filled('{"":[]}', 4_000_000) + b"]}"),
    "a config of 100 MB": ("model_config", lambda: b'{"a":[' + filled("[]", 100_000_000) + b"]}"),
    "a config of many token ids": ("model_config", lambda: b'{"eos_token_id":[' + filled("99999", 1_000_000) + b"]}"),
    "a generation_config of lists": ("generation_config", lambda: b'{"eos_token_id":[' + filled("[]", 4_000_000) + b"]}"),
    "a quantisation of many groups": ("int4_config", lambda: b'{"quantization_config":{' + b",".join(
        b'"%x":{}' % i for i in range(300_000)) + b"}}"),
    "an adapter_config of lists": ("adapter_config", lambda: b'{"rank_pattern":[' + filled("[[]]", 4_000_000) + b"]}"),
    "an adapter's header of lists": ("adapter_weights", lambda: header(b'{"a":[' + filled("[]", 15_000_000) + b"]}")),
    "a tokenizer_config of lists": ("tokenizer_config", lambda: b'{"eos_token":[' + filled("[]", 15_000_000) + b"]}"),
    "a recipe of tables": ("recipe", lambda: b"\n".join(b"[a%x]" % i for i in range(400_000))),
    "a small recipe of tables": ("recipe", lambda: b"\n".join(b"[a%x]" % i for i in range(28_000))),
    "a recipe that nests": ("recipe", lambda: b"a = " + b"[" * 200_000),
    "a recipe of dotted keys": ("recipe", lambda: b"a" + b".a" * 120_000 + b" = 1"),
    "a recipe of quoted keys": ("recipe", lambda: b"'a'" + b" . 'a'" * 40_000 + b" = 1"),
    "a recipe of one long word": ("recipe", lambda: b"a" * 262_000),
    "a recipe of keys in a table": ("recipe", lambda: b"[" + b"a." * 30 + b"a]" + filled_lines("%x.b=1", 25_000)),
    "a recipe of one array": ("recipe", lambda: b"a = [" + filled("[]", 250_000) + b"]"),
    "a run's record of lists": ("run", lambda: b'{"resolved":[' + filled("[]", 4_000_000) + b"]}"),
    "a GGUF array of empty arrays": ("gguf", lambda: gguf(texts(1_000_000, 0, kind=9))),
    "a GGUF array of empty texts": ("gguf", lambda: gguf(texts(1_500_000, 0))),
    "a GGUF array of short texts": ("gguf", lambda: gguf(texts(1_500_000, 1))),
    "a GGUF of many fields": ("gguf", lambda: gguf(*(text(b"%x" % i) + struct.pack("<IB", 0, 1) for i in range(700_000)))),
    "a GGUF of one long text": ("gguf", lambda: gguf(text(b"k") + struct.pack("<I", 8) + text(b"x" * 15_000_000))),
    "a GGUF of bytes": ("gguf", lambda: gguf(text(b"k") + struct.pack("<IIQ", 9, 0, 15_000_000) + bytes(15_000_000))),
    "a GGUF token of half a million characters": ("gguf_model", lambda: gguf_model([b"<unk>", b"x" * 2**19])),
    "GGUF tokens of 256 characters": ("gguf_model", lambda: gguf_model([b"%0256x" % i for i in range(20_000)])),
    "GGUF tokens that all merge": ("gguf_model", lambda: gguf_model(words(250_000))),
    "a few GGUF tokens that all merge": ("gguf_model", lambda: gguf_model(words(10_000))),
    "very many GGUF tokens": ("gguf_model", lambda: gguf_model([b"%x" % i for i in range(600_000)])),
    "GGUF tokens that are all marked": ("gguf_model", lambda: gguf_model([b"%0200x" % i for i in range(20_000)], 3)),
    "a few marked GGUF tokens": ("gguf_model", lambda: gguf_model([b"%020x" % i for i in range(11_000)], 3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, int]]:
    """For a kind: the folder, the file in it, and the peak of a child that reads the sound one."""
    made: dict[str, tuple[Path, Path, int]] = {}

    def get(name: str) -> tuple[Path, Path, int]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            file = SUBJECTS[name].make(folder)
            peak, _, error = read_in_child(name, folder)
            assert error is None
            made[name] = folder, file, peak
        return made[name]

    return get


@pytest.mark.soak
@pytest.mark.parametrize("case", HOSTILE)
def test_memory_and_time_stay_in_proportion_to_the_file(case: str, sound: Callable[[str], tuple[Path, Path, int]]) -> None:
    name, make = HOSTILE[case]
    if SUBJECTS[name].needs_assets and not ASSETS.is_dir():
        pytest.skip(f"the shared assets are not at {ASSETS}; set TWOSTROKE_ASSETS to their folder")
    folder, file, peak_of_sound = sound(name)
    content = make()
    file.unlink()
    file.write_bytes(content)
    peak, took, error = read_in_child(name, folder)
    print(f"{case}: {len(content)} bytes, {(peak - peak_of_sound) / 1e6:+.0f} MB, {took:.2f} s, {(error or 'read')[:150]}")
    assert peak - peak_of_sound <= 2 * len(content) + SPARE_BYTES
    assert took < MOST_CPU_S
