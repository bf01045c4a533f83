"""The decoder of a fixed cache computes what ours computes, and (in ``make soak``) so do the programs made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peers import ask, assert_answers_as_we_do, error, export_with_packages

from hf_models import random_tokens, save_reference
from real_model import make_model
from small_models import EVERY, decoder_of, saved
from twostroke.core.errors import ConfigError
from twostroke.core.families import FAMILIES
from twostroke.core.spec import ModelSpec
from twostroke.interop import static_decoder
from twostroke.interop.coreml import WithStates, traced
from twostroke.interop.export_targets import TARGETS, ExportSource
from twostroke.interop.litert import named
from twostroke.interop.static_decoder import StaticDecoder, notes_of, require_groups
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model, load_state
from twostroke.model.save import save_model

IDS = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(5))
LONG = torch.randint(2, 97, (1, 150), generator=torch.Generator().manual_seed(6))
FP32 = ("cohere2", "deepseek_v3", "gemma2", "glm4", "gpt2", "gpt_neox", "gpt_oss", "llama-scaled", "olmo3", "qwen2_moe")
"""Between them every operation of all families; an export takes most of a minute."""
CASE_OF = {"gemma3_text": "gemma3"}
OTHERS = sorted(set(FAMILIES) - {EVERY[name].family for name in FP32})
"""Families that ``FP32`` has no model of."""
WIDE = {"d_model": 96, "head_dim": 16, "d_ff": 96}  # which groups of 32 divide
ROUNDED = {
    "int8": ("llama", "int8"), "int4": ("llama", "int4"), "experts-int8": ("qwen2_moe", "int8"),
    "experts-int4": ("glm4_moe", "int4"), "fp16": ("llama-scaled", "fp16"),
}  # fmt: skip
WITHIN = {"fp32": 1e-5, "fp16": 0.02, "int8": 0.25, "int4": 0.25}
"""Inputs rounded to 8 bits: up to 0.14 (measured), against 0.6 of weights rounded to 4 bits and 1.4 of unlike logits."""

PROMPT = """
import jinja2, json, sys
from pathlib import Path
from tokenizers import Tokenizer
def prompt_of(folder):
    template = jinja2.Template((folder / "chat_template.jinja").read_text())
    text = template.render(messages=[{"role": "user", "content": "import os"}])
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
"""
EXECUTORCH = (
    PROMPT
    + """
import torch
from executorch.runtime import Runtime
def program(folder):
    method = Runtime.get().load_program(str(folder / "model.pte")).load_method("forward")
    def passed(ids, start):
        (logits,) = method.execute([torch.tensor([ids]), torch.tensor([start])])
        return logits[0].tolist()
    return passed
"""
)
LITERT = (
    PROMPT
    + """
import numpy as np
from ai_edge_litert.interpreter import Interpreter
def program(folder):
    interpreter = Interpreter(model_path=str(folder / "model.tflite"))
    runners = {kind.partition("_")[0]: interpreter.get_signature_runner(kind) for kind in interpreter.get_signature_list()}
    kept = [one for one in interpreter.get_signature_list()["decode"]["inputs"] if one.startswith("kv_cache")]
    past = {one: np.zeros(runners["decode"].get_input_details()[one]["shape"], np.float32) for one in kept}
    long = int(runners["prefill"].get_input_details()["tokens"]["shape"][1])
    def passed(ids, start):
        whole = len(ids) // long * long
        parts = [ids[i : i + long] for i in range(0, whole, long)] + [[one] for one in ids[whole:]]
        for part in parts:
            place = np.arange(start, start + len(part), dtype=np.int32)
            kind = runners["decode" if len(part) == 1 else "prefill"]
            answer = kind(tokens=np.array([part], np.int32), input_pos=place, **past)
            logits, start = answer.pop("logits"), start + len(part)
            past.update(answer)
        return logits[0].tolist()
    return passed
"""
)
KINDS = """
import json, sys
from pathlib import Path
from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_quantizer.utils.tfl_flatbuffer_utils import read_model
names, kinds = {value: name for name, value in vars(TensorType).items() if isinstance(value, int)}, {}
for tensor in (one for graph in read_model(str(Path(sys.argv[1]) / "model.tflite")).subgraphs[:2] for one in graph.tensors):
    kinds.setdefault(str(list(tensor.shape)), set()).add(names[tensor.type])
print("FOUND", json.dumps({shape: sorted(kind) for shape, kind in kinds.items()}))
"""
LOGITS = """
ids, firsts = json.loads(sys.argv[2])
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    passed = program(folder)
    for first in firsts:  # the second text begins anew over what the first left in the cache
        found[folder.name] = [passed(ids[:first], 0)] + [passed(ids[i : i + 1], i) for i in range(first, len(ids))]
print("FOUND", json.dumps(found))
"""
GREEDY = """
folder = Path(sys.argv[1])
passed = program(folder)
end = json.loads((folder / "config.json").read_text())["eos_token_id"]
prompt, tokens = prompt_of(folder), []
logits = passed(prompt, 0)
while len(tokens) < 64:
    tokens.append(max(range(len(logits)), key=logits.__getitem__))
    if tokens[-1] == end:
        break
    logits = passed(tokens[-1:], len(prompt) + len(tokens) - 1)
print("FOUND", json.dumps([prompt, tokens]))
"""
COREML = (
    PROMPT
    + Path(__file__).with_name("mil_interpreter.py").read_text().partition("from __future__ import annotations\n")[2]
    + """
def program(folder):
    one = Program(folder)
    return lambda ids, start: one(ids, start)["logits"][0].tolist()
"""
)
DESCRIPTION = """
from coremltools.proto.FeatureTypes_pb2 import ArrayFeatureType
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    says = Program(folder).description
    arrays = {one.name: one.type.multiArrayType for one in (*says.input, *says.output)}
    arrays |= {one.name: one.type.stateType.arrayType for one in says.state}
    kinds = {name: [list(one.shape), ArrayFeatureType.ArrayDataType.Name(one.dataType)] for name, one in arrays.items()}
    ranges = {name: [[n.lowerBound, n.upperBound] for n in one.shapeRange.sizeRanges] for name, one in arrays.items()}
    found[folder.name] = [kinds, {name: one for name, one in ranges.items() if one}]
print("FOUND", json.dumps(found))
"""
PROGRAMS = {"coreml": COREML, "executorch": EXECUTORCH, "litert": LITERT}


def round_to_groups(decoder: Decoder) -> None:
    """Weights of the blocks as whole multiples of up to ±7 of a power of two: 4 bits hold them exactly, also by scales of 16
    bits. The first of each group is the largest, so that a scale is found from it."""
    for name, weight in decoder.named_parameters():
        if weight.ndim == 2 and name.startswith("blocks") and name.split(".")[-2] not in static_decoder.PLAIN:
            groups = weight.view(-1, static_decoder.GROUP)
            scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(dim=1, keepdim=True) / 7)))
            codes = (groups / scales).round()
            codes[:, 0] = 7.0
            groups.copy_(codes * scales)


def opened(directory: Path) -> ExportSource:
    spec, state = load_state(directory)
    return ExportSource(directory, spec, state, None)


def logits_by_states(source: Path) -> torch.Tensor:
    """Of ``LONG`` from its third token on, by a cache that Core ML rounds to fp16."""
    program = WithStates(StaticDecoder(opened(source))).eval()
    found = [program(LONG[:, :3], torch.arange(3))]
    return torch.cat(found + [program(LONG[:, i : i + 1], torch.arange(i, i + 1)) for i in range(3, LONG.shape[1])])


@pytest.mark.parametrize("name", sorted(EVERY))
@torch.no_grad()
def test_a_fixed_cache_changes_no_logits(name: str, tmp_path: Path) -> None:
    """A prompt, then single tokens; afterwards a shorter text over what the first left in the cache."""
    decoder, source = saved(name, tmp_path)
    program = StaticDecoder(opened(source)).eval()
    wanted, cache = decoder(IDS)[0], program.empty_cache()
    for first in (14, 3):
        logits, cache = program(IDS[:, :first], torch.arange(first), cache)
        found = [logits]
        for i in range(first, IDS.shape[1]):
            logits, cache = program(IDS[:, i : i + 1], torch.arange(i, i + 1), cache)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found), wanted[first - 1 :], rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own trees
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2"])
@torch.no_grad()
def test_states_in_fp16_and_a_traced_graph_change_little(name: str, tmp_path: Path) -> None:
    """Of operations that coremltools knows not, or not by their name; 1e-3 is what fp16 in the cache costs (measured)."""
    decoder, source = saved(name, tmp_path)
    wanted = decoder(LONG)[0, 2:]
    errors = (logits_by_states(source) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 0 < float(errors.median()) < 4e-3  # a router may choose otherwise in a few rows
    program = WithStates(StaticDecoder(opened(source))).eval()
    graph = traced(program)
    names = {str(node.target) for node in graph.graph.nodes}
    assert not names & {"aten.__and__.Tensor", "aten.scatter.value", "aten.where.ScalarOther"}
    assert [one for one in dict(graph.named_buffers()) if "cache" in one] == [
        f"{kind}_cache_{i}" for i in range(3) for kind in "kv"
    ]
    ids, positions = LONG[:, :9].int(), torch.arange(9, dtype=torch.int32)
    torch.testing.assert_close(graph.module()(ids, positions), program(ids, positions), rtol=0, atol=1e-5)


def test_caches_are_named_by_kind_and_layer(tmp_path: Path) -> None:
    program = StaticDecoder(opened(saved("llama", tmp_path)[1]))
    tensors = named(program.empty_cache())
    assert sorted(tensors) == sorted(f"kv_cache_{kind}_{layer}" for kind in "kv" for layer in range(3))
    assert {tuple(one.shape) for one in tensors.values()} == {(1, 2, 256, 8)}


def test_what_a_program_does_not_hold_is_refused_or_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="groups of 32, which do not divide the 48 inputs of qkv"):
        require_groups(EVERY["llama"], "executorch")
    require_groups(EVERY["llama"].with_(**WIDE), "executorch")
    with pytest.raises(ConfigError, match="do not divide the 80 inputs of expert_down"):
        require_groups(EVERY["mixtral"].with_(**WIDE), "litert")
    assert "each token passes all 5 experts, of which its router chooses 2" in notes_of(EVERY["mixtral"])[0]
    monkeypatch.setattr(static_decoder, "CONTEXT", 128)
    spec: ModelSpec = EVERY["llama"]
    assert notes_of(spec) == ("the program's cache holds 128 of the model's 256 tokens.",)
    assert StaticDecoder(opened(saved("llama", tmp_path / "llama")[1])).n_context == 128


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", PROGRAMS)
@torch.no_grad()
def test_programs_compute_what_we_compute(target: str, tmp_path: Path) -> None:
    exports, wanted = [], {}
    for name in (*FP32, *ROUNDED):
        family, precision = ROUNDED.get(name, (name, "fp32"))
        if precision not in TARGETS[target].precisions:
            continue
        decoder = decoder_of(family, **(WIDE if name in ROUNDED else {}))
        if precision == "int4":
            round_to_groups(decoder)
        source = save_model(decoder, decoder.spec, tmp_path / "sources" / name)
        exports.append((str(source), str(tmp_path / "out" / name), precision))
        wanted[name] = logits_by_states(source) if target == "coreml" else decoder(LONG)[0, 2:], WITHIN[precision]
    export_with_packages(target, exports)
    found = ask(target, PROGRAMS[target] + LOGITS, tmp_path / "out", json.dumps([LONG[0].tolist(), (140, 3)]))
    for name, (logits, within) in wanted.items():
        assert error(found[name], logits) < within, name


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
@torch.no_grad()
def test_litert_computes_the_other_families(family: str, tmp_path: Path) -> None:
    """Models of transformers' own configurations, each in a process of its own: an export takes most of a minute."""
    ids = random_tokens(n_rows=1)
    save_reference(CASE_OF.get(family, family), tmp_path / "source")
    export_with_packages("litert", [(str(tmp_path / "source"), str(tmp_path / "out" / family), "fp32")])
    found = ask("litert", LITERT + LOGITS, tmp_path / "out", json.dumps([ids[0].tolist(), (36, 3)]))
    assert error(found[family], load_model(tmp_path / "source")(ids)[0, 2:]) < WITHIN["fp32"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_head_of_litert_has_eight_bits_where_the_rest_has_four(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "tiny")
    export_with_packages("litert", [(str(source), str(tmp_path / "out"), "int4")])
    kinds = ask("litert", KINDS, tmp_path / "out")
    assert kinds["[512, 64]"] == ["FLOAT32", "INT8"]  # embedding and head
    assert kinds["[256, 64]"] == ["INT4"]  # gate and up


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_package_says_what_it_reads_writes_and_keeps(tmp_path: Path) -> None:
    sources = {name: saved(name, tmp_path / "sources" / name)[1] for name in ("llama", "qwen3")}
    export_with_packages("coreml", [(str(sources[name]), str(tmp_path / "out" / name), "fp16") for name in sources])
    found = ask("coreml", COREML + DESCRIPTION, tmp_path / "out")
    for name in sources:
        shape = [1, 2, 256, EVERY[name].head_dim]
        states = {f"{kind}_cache_{layer}": [shape, "FLOAT16"] for layer in range(3) for kind in "kv"}
        kinds, ranges = found[name]
        assert kinds == {"tokens": [[1, 1], "INT32"], "input_pos": [[1], "INT32"], "logits": [[1, 97], "FLOAT32"]} | states
        assert ranges == {"tokens": [[1, 1], [1, 255]], "input_pos": [[1, 255]]}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", ["6M", "experts"])
@pytest.mark.parametrize("target", PROGRAMS)
def test_programs_answer_as_we_do(target: str, size: str, tmp_path: Path) -> None:
    """64 greedy tokens of a chat, with our tokenizer and template."""
    assert_answers_as_we_do(target, PROGRAMS[target] + GREEDY, tmp_path, size)
