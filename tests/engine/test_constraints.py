"""Answers of a given form: always valid, never narrower than the form, and nothing else changes."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from real_model import make_model
from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.core.families import read_spec
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine import adjust, sampler
from twostroke.engine.core import EngineCore
from twostroke.engine.grammars import Grammars, Matcher
from twostroke.engine.llm import LLM, RequestOutput
from twostroke.engine.sampler import sample
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.forced import ForcedDrafts
from twostroke.kernels.native_library import library
from twostroke.scheduling.constraint import MAX_CHARACTERS, Constraint
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams

pytest.importorskip("llguidance")
validator_for = pytest.importorskip("jsonschema_rs").validator_for

PROMPT = "def add_argument(self, name):\n    return "
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""A small random model likes white space, and could write it for ever."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("constrained") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, dtype="fp32", n_threads=1)


def any_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances are short."""
    kinds = ["string", "integer", "boolean", "enum", "pattern"] + (["object", "array", "union"] if depth else [])
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)}
        case "boolean":
            return {"type": ["boolean", "null"]}
        case "enum":
            return {"enum": [rng.choice(["é", 'a"b', "\n", "long text", "x"]), rng.randint(-9, 9), None, [1, {"a": "b"}]]}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^[0-9]{2}-[A-Z]$", "^(ab|cd)+e{0,2}f$"])}
        case "array":
            n = rng.randint(0, 2)
            return {"type": "array", "items": any_schema(rng, depth - 1), "minItems": n, "maxItems": n + 1}
        case "union":
            return {"anyOf": [any_schema(rng, depth - 1) for _ in range(2)]}
    names = rng.sample(["a", "b c", "é", "name", 'q"uote'], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: any_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


SCHEMAS = [any_schema(random.Random(seed)) | COMPACT for seed in range(14)]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_answers_under_any_schema_parse_and_are_valid(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=350,
            n=1 if temperature == 0 else 3,
            constraint=Constraint.json_schema(s),
        )
        for i, s in enumerate(SCHEMAS)
    ]
    n_stopped = n_all = 0
    for schema, output in zip(SCHEMAS, llm.generate([PROMPT] * len(params), params), strict=True):
        for answer in output.outputs:
            n_all += 1
            if answer.finish_reason == "stop":
                n_stopped += 1
                assert validator_for(schema).is_valid(json.loads(answer.text)), (schema, answer.text)
            else:
                assert answer.finish_reason == "length", answer.finish_reason
    assert n_stopped > 0.8 * n_all, "most schemas have short instances only"


def test_other_forms_hold_too(llm: LLM) -> None:
    forms = {
        r"\d{3}-[a-f]{2}": Constraint.regex(r"\d{3}-[a-f]{2}"),
        r'yes|"no"\n|é': Constraint.choice(["yes", '"no"\n', "é"]),
        r"(ab|c+)( (ab|c+)){0,3}!": Constraint.grammar('start: word (" " word)~0..3 "!"\nword: "ab" | /c+/'),
    }
    params = [SamplingParams(temperature=1.0, seed=3, max_tokens=60, n=4, constraint=form) for form in forms.values()]
    for pattern, output in zip(forms, llm.generate([PROMPT] * 3, params), strict=True):
        ended = [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
        assert ended
        assert all(re.fullmatch(pattern, text) for text in ended), (pattern, ended)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=40, seed=1, constraint=Constraint.json_object()))
    assert output.outputs[0].text.lstrip()[:1] == "{"


def instance(schema: dict[str, Any], rng: random.Random) -> Any:
    """What ``schema``, one of ``any_schema``'s, allows."""
    if "anyOf" in schema:
        return instance(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "pattern" in schema:
        return {"^[a-c]{1,3}$": "cab", "^[0-9]{2}-[A-Z]$": "07-Q", "^(ab|cd)+e{0,2}f$": "cdabef"}[schema["pattern"]]
    match schema["type"]:
        case "string":
            return "".join(rng.choice('aé"\\\n 😀Z') for _ in range(rng.randint(schema["minLength"], schema["maxLength"])))
        case "integer":
            return rng.randint(schema["minimum"], schema["maximum"])
        case "array":
            return [instance(schema["items"], rng) for _ in range(rng.randint(schema["minItems"], schema["maxItems"]))]
        case "object":
            names = [name for name in schema["properties"] if name in schema["required"] or rng.random() < 0.5]
            return {name: instance(schema["properties"][name], rng) for name in names}
    return rng.choice([True, False, None])


def any_tokens(text: str, tokens: dict[bytes, int], rng: random.Random) -> list[int]:
    """Tokens that make up ``text``, cut anywhere that the vocabulary allows."""
    raw, found = text.encode(), []
    while raw:
        longest = rng.randint(1, 8)
        n = next(n for n in range(min(longest, len(raw)), 0, -1) if raw[:n] in tokens)
        found.append(tokens[raw[:n]])
        raw = raw[n:]
    return found


def test_no_token_of_a_valid_instance_is_forbidden(model: Path) -> None:
    from twostroke.server.text import ModelText

    text = ModelText(model)
    grammars, rng, eos = Grammars(model, read_spec(model)), random.Random(5), 0
    tokens = {text.token_bytes(i): i for i in range(1, text.tokenizer.get_vocab_size())}
    for schema in [any_schema(random.Random(seed)) for seed in range(40)]:
        value = instance(schema, rng)
        assert validator_for(schema).is_valid(value)
        for written in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, separators=(",", ":"), ensure_ascii=False),
            json.dumps(value, indent=1, ensure_ascii=False),
        ):
            for ids in (text.tokenizer.encode(written).ids, any_tokens(written, tokens, rng)):
                request = Request("r", [5, 6], SamplingParams(constraint=Constraint.json_schema(schema)))
                grammars.begin(request, Constraint.json_schema(schema))
                assert isinstance(request.matcher, Matcher)
                for token in [*ids, eos]:
                    request.matcher.look(request.tokens)
                    assert request.matcher.allowed(512)[token], (schema, written, len(request.tokens) - 2)
                    request.tokens.append(token)
                assert request.matcher.accepted([5, 6], ids) == len(ids), "taken back to the beginning"


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.finish_reason) for output in outputs for answer in output.outputs]


MIXED = [
    SamplingParams(
        temperature=1.0, seed=i, max_tokens=40, n=2, frequency_penalty=0.2, constraint=Constraint.json_schema(SCHEMAS[i])
    )
    if i % 2
    else SamplingParams(temperature=1.0, seed=i, max_tokens=40)
    for i in range(8)
]


def test_a_neighbour_with_a_form_changes_nothing(llm: LLM) -> None:
    together = llm.generate([PROMPT] * 8, MIXED)
    alone = llm.generate([PROMPT] * 4, MIXED[::2])
    assert answers(together[::2]) == answers(alone)


def test_preempted_answers_go_on_in_their_form(llm: LLM, model: Path) -> None:
    bytes_of_page = llm.engine.kv_cache_bytes // llm.engine.scheduler.config.n_pages
    page_tokens = llm.engine.scheduler.config.page_tokens
    pages = 3 + 2 * -(-(40 + len(load_tokenizer(model).encode(PROMPT).ids)) // page_tokens)
    tight = LLM(model, dtype="fp32", n_threads=1, kv_cache_bytes=pages * bytes_of_page)
    assert answers(tight.generate([PROMPT] * 8, MIXED)) == answers(llm.generate([PROMPT] * 8, MIXED))
    assert tight.stats().preemptions > 0


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_drafts_change_no_answer_and_are_cut_to_the_form(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "array", "items": {"enum": ["alpha beta", "gamma"]}, "minItems": 6, "maxItems": 6} | COMPACT
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=120, logprobs=2, constraint=Constraint.json_schema(schema))
        for temperature in (0.0, 1.0)
    ]
    settings: dict[str, Any] = {"dtype": "fp32", "n_threads": 1}
    plain = LLM(model, **settings).generate([PROMPT] * 2, params)
    accepted: list[tuple[int, int]] = []
    original = Matcher.accepted

    def counted(self: Matcher, tokens: Sequence[int], draft: Sequence[int]) -> int:
        n = original(self, tokens, draft)
        accepted.append((n, len(draft)))
        return n

    monkeypatch.setattr(Matcher, "accepted", counted)
    monkeypatch.setattr(ForcedDrafts, "propose", lambda *_: {})
    drafting = LLM(model, **settings, speculate="ngram")
    drafted = drafting.generate([PROMPT] * 2, params)
    assert answers(drafted) == answers(plain)
    assert [o.outputs[0].logprobs for o in drafted] == [o.outputs[0].logprobs for o in plain]
    assert drafting.stats().accepted_draft_tokens > 0
    assert sum(n for n, _ in accepted) >= drafting.stats().draft_tokens


@pytest.mark.skipif(library() is None, reason="the native library was not built")
def test_the_reference_chooses_the_same_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=50, constraint=Constraint.json_schema(SCHEMAS[i]), logprobs=i % 3 or None)
        for i in range(6)
    ]
    native = llm.generate([PROMPT] * 6, params)
    monkeypatch.setattr(adjust, "library", lambda: None)
    monkeypatch.setattr(sampler, "library", lambda: None)
    plain = llm.generate([PROMPT] * 6, params)
    assert answers(plain) == answers(native)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    (without,) = llm.generate(PROMPT, free)
    (within,) = llm.generate(PROMPT, replace(free, constraint=Constraint.choice(["~"])))
    assert within.outputs[0].text == "~"
    assert within.outputs[0].logprobs is not None
    assert without.outputs[0].logprobs is not None
    assert within.outputs[0].logprobs[0].top == without.outputs[0].logprobs[0].top
    assert within.outputs[0].logprobs[0].logprob < without.outputs[0].logprobs[0].logprob


class _Spent:
    """A form whose limits are reached."""

    def unsafe_compute_mask_ptr(self, address: int, n_bytes: int) -> None:
        pass

    def is_error(self) -> bool:
        return True


def test_an_answer_whose_form_cannot_go_on_fails_alone() -> None:
    spent, free = (Request(name, [1, 2], SamplingParams(temperature=0.0)) for name in "ab")
    spent.adjusted, spent.matcher = True, Matcher(_Spent(), 2, 50, frozenset())
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sampled = sample(logits, [spent, free], [0, 0])
    assert sampled.failed == [0]
    assert sampled.tokens[1] == int(before[1].argmax())
    assert torch.equal(logits, before)


REFUSED: dict[str, tuple[Any, str]] = {
    "no such type": (Constraint.json_schema({"type": "strin"}), "JSON schema cannot be used: Invalid type: strin"),
    "not known": (Constraint.json_schema({"uniqueItems": True}), "uniqueItems"),
    "nothing": (Constraint.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text has this form"),
    "elsewhere": (Constraint.json_schema({"$ref": "http://127.0.0.1:9/x"}), "does not fetch"),
    "pattern": (Constraint.regex("a("), "regular expression cannot be used"),
    "grammar": (Constraint.grammar("start: nothing"), 'unknown name: "nothing"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM, name: str) -> None:
    constraint, sentence = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        llm.generate(PROMPT, SamplingParams(constraint=constraint))
    assert caught.value.field == "constraint"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Constraint("yaml"), "constraint"),  # type: ignore[arg-type]
        (lambda: Constraint.regex("a" * (MAX_CHARACTERS + 1)), "constraint"),
        (lambda: Constraint.json_schema("{"), "constraint"),
        (lambda: Constraint.json_schema("[1]"), "constraint"),
        (lambda: Constraint.json_schema("[" * 100_000), "constraint"),
        (lambda: Constraint.json_schema({"enum": {1, 2}}), "constraint"),
        (lambda: Constraint.choice([]), "constraint"),
        (lambda: Constraint.choice(["a", ""]), "constraint"),
        (lambda: SamplingParams(constraint="a+"), "constraint"),  # type: ignore[arg-type]
        (lambda: SamplingParams(constraint=Constraint.json_object(), min_tokens=2), "min_tokens"),
        (lambda: SamplingParams(constraint=Constraint.json_object(), ignore_eos=True), "ignore_eos"),
        (lambda: SamplingParams(constraint=Constraint.json_object(), temperature=0.0, use_beam_search=True), "use_beam_search"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_at_once(make: Any, field: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.field == field


def test_a_model_without_what_a_form_needs_says_so(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=2, constraint=Constraint.json_object())
    bare = EngineCore(saved("llama", tmp_path / "bare")[1], EngineSettings(n_threads=1))
    with pytest.raises(DataError, match="tokenizer"):
        bare.add_request("r", [5], params)
    endless = Grammars(model, read_spec(model).with_(eos_token_ids=()))
    with pytest.raises(InputError, match="names no end token"):
        endless.compile(Constraint.json_object())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install llguidance"):
        Grammars(model, read_spec(model)).compile(Constraint.json_object())


def test_a_compiled_form_is_kept(model: Path) -> None:
    grammars = Grammars(model, read_spec(model))
    first = grammars.compile(Constraint.regex("a+"))
    assert grammars.compile(Constraint.regex("a+")) is first
    assert grammars.compile(Constraint.regex("b+")) is not first


def test_rows_of_the_embedding_without_a_token_are_never_allowed(model: Path) -> None:
    spec = read_spec(model)
    grammars = Grammars(model, spec.with_(vocab_size=spec.vocab_size + 70))
    request = Request("r", [5], SamplingParams())
    grammars.begin(request, Constraint.regex("(.|\n)*"))
    assert isinstance(request.matcher, Matcher)
    request.matcher.look(request.tokens)
    allowed = request.matcher.allowed(spec.vocab_size + 70)
    assert not allowed[spec.vocab_size :].any()
    assert np.count_nonzero(allowed) > 300


FIXED = Constraint.grammar('start: "the answer is always the same text, " /[a-z]{1,6}/ " and it ends so, every single time."')


@pytest.mark.skipif(library() is None, reason="drafts are the native runner's")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_text_is_drafted_and_changes_no_answer(model: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is given allows one way of cutting forced text, so each of its drafts is right; a schema allows all."""
    monkeypatch.setattr(Drafter, "propose", lambda *_: {})
    forms = [FIXED, *(Constraint.json_schema(schema) for schema in SCHEMAS[:4])]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60, constraint=form) for i, form in enumerate(forms)]
    found = {}
    for speculate in ("off", "auto"):
        llm = LLM(model, dtype="fp32", n_threads=1, speculate=speculate)
        found[speculate] = [answers(llm.generate([PROMPT] * len(params), params)) for _ in range(3)]
        alone = llm.stats()
        llm.generate(PROMPT, params[0])
        last = llm.stats()
        n_steps = last.decode_steps - alone.decode_steps
        n_tokens = last.output_tokens - alone.output_tokens
    assert found["off"] == found["auto"]
    assert last.accepted_draft_tokens > alone.accepted_draft_tokens
    assert n_steps < n_tokens / 2, (n_steps, n_tokens)
