"""ONNX graphs: what the file holds, and (in ``make soak``) that onnxruntime and onnxruntime-genai compute what we compute."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from peers import ask, assert_answers_as_we_do, error, export_with_packages
from safetensors.torch import load_file, save_file

from real_model import greedy_reference
from small_models import EVERY, saved
from twostroke.interop.export_model import export_model
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.onnx import BLOCK, DATA, GRAPH, in_blocks, of_blocks
from twostroke.interop.openvino import write_openvino
from twostroke.model.load import load_model, load_state

LOGITS = """
import json, sys
import numpy as np, onnx, onnxruntime
from pathlib import Path
ids = np.array(json.loads(sys.argv[2]))
kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
def passed(session, ids, mask, past):
    kept = [one for one in session.get_inputs() if one.name.startswith("past")]
    empty = lambda one: np.zeros((len(ids), one.shape[1], 0, one.shape[3]), kinds[one.type])
    feeds = {one.name: past[i] if past else empty(one) for i, one in enumerate(kept)}
    logits, *present = session.run(None, feeds | {"input_ids": ids, "attention_mask": mask})
    names = [one.name for one in session.get_outputs()][1:]
    assert [name.replace("present", "past_key_values") for name in names] == [one.name for one in kept]
    return logits, present
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    onnx.checker.check_model(str(folder / "model.onnx"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    n = ids.shape[1]
    ones = np.ones((1, n), np.int64)
    first, past = passed(session, ids[:, :14], ones[:, :14], None)
    parts = [first[0]]
    for start in range(14, n):
        logits, past = passed(session, ids[:, start : start + 1], ones[:, : start + 1], past)
        parts.append(logits[0])
    padded = np.concatenate([np.zeros((1, 3), np.int64), ids], axis=1)
    short = np.concatenate([padded, np.concatenate([ids, ids[:, :3]], axis=1)])
    mask = np.ones_like(short)
    mask[0, :3] = 0
    both, _ = passed(session, short, mask, None)
    found[folder.name] = [np.concatenate(parts).tolist(), both[0, 3:].tolist()]
print("FOUND", json.dumps(found))
"""
OPENVINO = """
import json, sys
import numpy as np, openvino
from pathlib import Path
ids = np.array(json.loads(sys.argv[2]))
exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
core, found = openvino.Core(), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = core.compile_model(folder / "openvino_model.xml", "CPU", exact)
    kept = [one for one in model.inputs if one.any_name.startswith("past")]
    past = {one.any_name: np.zeros((1, one.partial_shape[1].get_length(), 0, one.partial_shape[3].get_length()), np.float32)
            for one in kept}
    parts, text, done = [], ids, 0
    for n in (14, *[1] * (ids.shape[1] + 63 - 14)):
        mask = np.ones((1, done + n), np.int64)
        answer = model({"input_ids": text[:, done : done + n], "attention_mask": mask} | past)
        parts.append(answer["logits"][0].copy())
        past = {name: answer[name.replace("past_key_values", "present")].copy() for name in past}
        done += n
        if done == text.shape[1]:
            text = np.append(text, [[parts[-1][-1].argmax()]], axis=1)
    found[folder.name] = np.concatenate(parts)[: ids.shape[1]].tolist(), text[0, ids.shape[1] :].tolist()
print("FOUND", json.dumps(found))
"""
GREEDY = """
import json, sys
import onnxruntime_genai as og
model = og.Model(sys.argv[1])
tokenizer = og.Tokenizer(model)
messages = json.dumps([{"role": "user", "content": "import os"}])
prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
params = og.GeneratorParams(model)
params.set_search_options(do_sample=False, max_length=len(prompt) + 64)
generator = og.Generator(model, params)
generator.append_tokens(prompt)
tokens = []
while not generator.is_done():
    generator.generate_next_token()
    tokens.append(int(generator.get_next_tokens()[0]))
print("FOUND", json.dumps([list(map(int, prompt)), tokens]))
"""
IDS = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(5))
NAMES = sorted(EVERY)


def messages(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(field, content) of each field of a message; of a whole number its bytes as they are."""
    place = 0

    def whole() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = raw[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(raw):
        key, start = whole(), place
        if key & 7 == 0:
            whole()
            yield key >> 3, raw[start:place]
        else:
            length = whole() if key & 7 == 2 else 4
            yield key >> 3, raw[place : place + length]
            place += length


def of_field(raw: bytes, field: int) -> list[bytes]:
    return [content for number, content in messages(raw) if number == field]


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_hold_numbers_to_a_step(bits: int) -> None:
    weight = torch.randn(5, 2 * BLOCK + 7, generator=torch.Generator().manual_seed(2))
    weight[1, :BLOCK] = 0.0
    codes, scales = in_blocks(weight, bits)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (5, 3, BLOCK * bits // 8), (5, 3))
    back = of_blocks(codes, scales, bits, weight.shape[1])
    steps = scales.abs().repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    assert ((back - weight).abs() <= 1.0001 * steps).all()  # the side opposite to the farthest number is a step short
    assert torch.equal(back[1, :BLOCK], weight[1, :BLOCK])


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_names_each_value_once_and_uses_only_what_is_before(name: str, tmp_path: Path) -> None:
    """ONNX wants nodes in order. Weights lie inside the file beside the graph, none on another."""
    _, source = saved(name, tmp_path / "source")
    export_model(source, tmp_path / "out", to="onnx", precision="fp32")
    (graph,) = of_field((tmp_path / "out" / GRAPH).read_bytes(), 7)
    known = {of_field(value, 1)[0] for value in of_field(graph, 11)} | {of_field(value, 8)[0] for value in of_field(graph, 5)}
    for node in of_field(graph, 1):
        assert set(of_field(node, 1)) <= known
        made = set(of_field(node, 2))
        assert not made & known
        known |= made
    assert {of_field(value, 1)[0] for value in of_field(graph, 12)} <= known
    end, size = 0, (tmp_path / "out" / DATA).stat().st_size
    for tensor in of_field(graph, 5):
        place = {of_field(entry, 1)[0]: of_field(entry, 2)[0] for entry in of_field(tensor, 13)}
        if place:
            assert int(place[b"offset"]) >= end
            end = int(place[b"offset"]) + int(place[b"length"])
    assert end == size


def test_a_write_that_openvino_fails_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO 2026.4 raises RuntimeError("basic_ios::clear: iostream error") on a full disk."""

    def fail(*_words: object, **_more: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    package = ModuleType("openvino")
    package.Core, package.save_model = MagicMock(), fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openvino", package)
    spec, state = load_state(saved("llama", tmp_path / "source")[1])
    source = ExportSource(tmp_path / "source", spec, state, None)
    with pytest.raises(OSError, match="OpenVINO could not write the model") as raised:
        write_openvino(source, tmp_path, "fp32")
    assert raised.value.filename
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device: .* to write, 1000 B free"):
        write_openvino(source, tmp_path, "fp32")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@torch.no_grad()
def test_onnxruntime_computes_what_we_compute(tmp_path: Path) -> None:
    """A prompt and then token by token from the cache, and the same beside another request with padding in front. Codes are
    compared with the numbers that they stand for; onnxruntime rounds what it multiplies with them to int8."""
    wanted = all_precisions(tmp_path, lambda source, out, kind: export_model(source, out, to="onnx", precision=kind))
    found = ask("onnx", LOGITS, tmp_path / "out", json.dumps(IDS.tolist()))
    for name, logits in wanted.items():
        for got in found[name]:
            assert error(got, logits) < {"fp16": 1e-2, "int8": 0.1, "int4": 0.1}.get(name.split("-")[-1], 1e-5), name


@pytest.mark.soak
@pytest.mark.timeout(3600)
@torch.no_grad()
def test_openvino_computes_what_we_compute(tmp_path: Path) -> None:
    """The same of OpenVINO's own files. It multiplies codes in fp32 if told to, so their layout is held to five digits."""
    exports: list[tuple[str, str, str]] = []
    wanted = all_precisions(tmp_path, lambda *words: exports.append((str(words[0]), str(words[1]), words[2])))
    export_with_packages("openvino", exports)
    found = ask("openvino", OPENVINO, tmp_path / "out", json.dumps(IDS.tolist()))
    for name, logits in wanted.items():
        got, tokens = found[name]
        assert error(got, logits) < {"fp16": 1e-2}.get(name.split("-")[-1], 1e-5), name
        if name in NAMES:
            assert tokens == greedy_reference(tmp_path / "sources" / name, IDS[0].tolist(), 64)[0], name


def all_precisions(folder: Path, export: Callable[[Path, Path, str], object]) -> dict[str, torch.Tensor]:
    """Exports of every model in fp32, and of two in each other precision; the logits that they must give."""
    wanted = {}
    for name in NAMES:
        decoder, source = saved(name, folder / "sources" / name)
        export(source, folder / "out" / name, "fp32")
        wanted[name] = decoder(IDS)[0]
    for family, precision in itertools.product(("llama", "olmoe"), ("fp16", "int8", "int4")):
        name = f"{family}-{precision}"
        _, source = saved(family, folder / "sources" / name)
        export(source, folder / "out" / name, precision)
        reference = Path(shutil.copytree(source, folder / "references" / name))
        if precision != "fp16":
            held = load_file(source / "model.safetensors")
            for key, weight in held.items():
                bits = 4 if precision == "int4" and not key.startswith("lm_head") else 8
                if weight.ndim == 2 and "embed" not in key and not key.endswith("mlp.gate.weight"):  # a router stays plain
                    held[key] = of_blocks(*in_blocks(weight, bits), bits, weight.shape[1]).contiguous()
            held["model.embed_tokens.weight"] = held["model.embed_tokens.weight"].half().float()
            save_file(held, reference / "model.safetensors", metadata={"format": "pt"})
        wanted[name] = load_model(reference)(IDS)[0]
    return wanted


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_onnxruntime_genai_answers_as_we_do(tmp_path: Path) -> None:
    """64 greedy tokens of a chat, with our tokenizer and template."""
    assert_answers_as_we_do("onnx", GREEDY, tmp_path)
