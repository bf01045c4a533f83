"""What a task makes of scores, against values worked out by hand; descriptions and records that break a rule."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.evaluation.encoding import Encoder
from twostroke.evaluation.records import read_records
from twostroke.evaluation.results import TaskResult, mean_of
from twostroke.evaluation.task import Extract, Task
from twostroke.evaluation.task_files import load_task, task_names


class _Spec:
    eos_token_ids = (1,)
    bos_token_id = None


def letters(bos: bool = False) -> Tokenizer:
    """Each byte one token; 0 begins a text, 1 ends it, and both are added by the tokenizer itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return tokenizer


class Fake:
    """A scorer whose −log p of a token is its byte's place in ``order`` plus one, and which writes ``written``."""

    engine, dtype, spec = "decoder", "fp32", _Spec()

    def __init__(self, cheap: str = "", written: Sequence[str] = (), longest: int = 1000, bos: bool = False) -> None:
        self.tokenizer, self.longest, self.written = letters(bos), longest, list(written)
        self.cheap = {self.tokenizer.token_to_id(c) for c in cheap}
        self.asked: list[tuple[list[int], int]] = []
        self.prompts: list[list[int]] = []

    def token_scores(self, sequences: Any, progress: Any = None) -> Any:
        self.asked += [(list(ids), first) for ids, first in sequences]
        scored = [np.array([0.5 if i in self.cheap else 2.0 for i in ids[first:]], np.float32) for ids, first in sequences]
        return [(nats, nats < 1) for nats in scored]

    def continue_greedily(self, prompts: Any, max_tokens: int, stop: Any = (), progress: Any = None) -> list[str]:
        self.prompts += [list(p) for p in prompts]
        return self.written[: len(prompts)]

    def text(self, i: int) -> tuple[str, str]:
        ids, first = self.asked[i]
        return self.tokenizer.decode(ids[:first]), self.tokenizer.decode(ids[first:])


def task(folder: Path, records: Sequence[Any], description: str) -> Task:
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "own.toml").write_text(f'file = "data.jsonl"\n{description}')
    return load_task(str(folder / "own.toml"))


CHOICE = 'kind = "choice"\nprompt = "{q}"\n'
MATCH = 'kind = "match"\nprompt = "{q}"\ntarget = "{t}"\n'
ANSWER = 'kind = "answer"\nprompt = "Q: {q}\\nA:"\ntarget = "{t}"\n'


def test_the_choice_with_the_smallest_cost_wins_and_length_is_taken_off_in_acc_norm(tmp_path: Path) -> None:
    """ "a" costs half a nat and all else 2: " aaaaaa" costs 5 in all, " b" 4. By character: 5/6 and 4/1."""
    records = [{"q": "x", "choices": ["aaaaaa", "b"], "gold": gold} for gold in (0, 1)]
    result = task(tmp_path, records, CHOICE).run(Fake("a"))
    assert result.scores["acc"].tolist() == [0, 1]
    assert result.scores["acc_norm"].tolist() == [1, 0]
    assert result.scores["gold_nats"].tolist() == [5, 4]
    assert result.chance == 0.5
    assert result.n_tokens == 2 * (7 + 2)
    metrics = result.metrics()
    assert metrics["acc"].value == 0.5
    assert metrics["acc"].standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))  # s of (0, 1) is √½


def test_gold_may_be_a_label_or_the_choice_itself(tmp_path: Path) -> None:
    """The layout of ARC: labels beside texts, the right one by its label."""
    record = {"q": "x", "choices": {"text": ["aa", "bb"], "label": ["A", "B"]}, "key": "B"}
    described = CHOICE + 'choices = "choices.text"\nlabels = "choices.label"\ngold = "key"'
    assert task(tmp_path, [record], described).run(Fake("b")).scores["acc"].tolist() == [1]
    fixed = CHOICE + 'choices = ["yes", "no, {q}"]\ngold = "key"'
    result = task(tmp_path, [{"q": "x", "key": "yes"}], fixed).run(fake := Fake("yes"))
    assert result.scores["acc"].tolist() == [1]
    assert fake.text(1) == ("x", " no, x")


def test_a_match_is_every_token_most_probable(tmp_path: Path) -> None:
    records = [{"q": "x ", "t": "aa"}, {"q": "x", "t": "ab"}]
    result = task(tmp_path, records, MATCH + 'delimiter = ""').run(fake := Fake("aĠ"))
    assert result.scores["acc"].tolist() == [1, 0]
    assert result.scores["target_nats"].tolist() == [1.5, 2.5]
    assert result.metrics()["perplexity"].value == pytest.approx(math.exp(2))
    assert fake.text(0) == ("x", " aa"), "a space at the context's end belongs to the continuation"


def test_answers_are_taken_out_of_what_is_written(tmp_path: Path) -> None:
    records = [{"q": "1", "t": "so #### 1,200"}, {"q": "2", "t": "#### 7"}, {"q": "3", "t": "#### -3"}]
    described = ANSWER + "[extract.exact]\npattern = '#### (-?[0-9.,]+)'\n[extract.last]\npattern = '-?[0-9]+'\nwhich = 'last'"
    written = [" it is #### 1200.", " 3 and then 7", "#### 3 -3"]
    result = task(tmp_path, records, described).run(Fake(written=written))
    assert result.scores["exact"].tolist() == [1, 0, 0]
    assert result.scores["last"].tolist() == [0, 1, 1]  # "200" is the last number of "1,200" for this pattern: not of "1200"
    whole = task(tmp_path, [{"q": "1", "t": "Yes"}, {"q": "1", "t": "No"}], ANSWER).run(Fake(written=[" yes.", "no way"]))
    assert whole.scores["exact"].tolist() == [1, 0]


def test_examples_are_shown_and_not_asked(tmp_path: Path) -> None:
    records = [{"q": str(i), "t": f"t{i}"} for i in range(4)]
    own = task(tmp_path, records, MATCH + "shots = 2")
    result = own.run(fake := Fake("t"))
    assert result.n_examples == 2
    assert fake.text(0) == ("0 t0\n\n1 t1\n\n2", " t2")
    assert own.run(Fake(), limit=1).n_examples == 1
    other = task(tmp_path, records, MATCH + 'shots = 1\nshots_file = "data.jsonl"')
    assert other.run(Fake()).n_examples == 4
    with pytest.raises(DataError, match=r"all records of .* are shown as examples"):
        task(tmp_path, records, MATCH + "shots = 4").run(Fake())
    with pytest.raises(DataError, match=r"shows 9 examples and .* has 4"):
        task(tmp_path, records, MATCH + "shots = 9").run(Fake())


def test_prompts_that_are_too_long_lose_their_beginning_and_are_counted(tmp_path: Path) -> None:
    records = [{"q": "abcdefgh", "t": "xy"}, {"q": "a", "t": "xy"}]
    result = task(tmp_path, records, MATCH).run(fake := Fake(longest=6))
    assert result.n_cut == 1
    assert fake.text(0) == ("efgh", " xy")  # six inputs (efgh x) and one more target
    assert fake.text(1) == ("a", " xy")
    result = task(tmp_path, records, ANSWER + "max_tokens = 3").run(fake := Fake(written=["xy", ""], longest=6))
    assert result.n_cut == 2
    assert [fake.tokenizer.decode(p) for p in fake.prompts] == ["\nA:", "\nA:"]
    with pytest.raises(InputError, match="max_tokens=6 leaves no room for a prompt in the model's context of 6"):
        task(tmp_path, records, ANSWER + "max_tokens = 6").run(Fake(longest=6))


def test_a_text_begins_as_the_tokenizer_begins_it_and_does_not_end() -> None:
    encoder = Encoder(Fake(bos=True))
    plain = Encoder(Fake())
    assert encoder.encode("a") == [0, *plain.encode("a")]
    assert encoder.encode("<s>a") == encoder.encode("a"), "a chat template wrote it already"
    pair = encoder.pair("", "ab")
    assert (pair.ids, pair.first) == (encoder.encode("ab"), 1)
    pair = plain.pair("", "ab")  # no beginning-of-text: what ends the text before
    assert (pair.ids, pair.first) == ([1, *plain.encode("ab")], 1)
    pair = plain.pair(" ", "ab")
    assert (pair.ids, pair.first) == ([1, *plain.encode(" ab")], 1)


def test_the_mean_has_the_standard_error_of_its_sample() -> None:
    found = mean_of(np.array([0.0, 1, 1, 1]))
    assert found.value == 0.75
    assert found.standard_error == pytest.approx(math.sqrt(0.25 / 4))  # s² = 0.25 · 4/3 · … with n − 1: 0.25
    assert math.isnan(mean_of(np.ones(1)).standard_error)


def test_every_task_of_the_package_reads_its_file(assets: Path) -> None:
    counts = {"arc_easy": 2376, "copa": 100, "gsm8k": 1314, "lambada": 5153, "piqa": 1838}
    assert task_names() == sorted(counts)
    for name, n in counts.items():
        own = load_task(name, assets / "eval")
        assert len(own.questions(None)[0]) == n, name
        fake = Fake(written=["#### 1"] * 3, longest=10**6)
        result = own.run(fake, limit=3)
        assert (result.n_examples, result.n_cut) == (3, 0)
        if name == "piqa":
            assert fake.text(0)[0].startswith("Question: How do I ready a guinea pig cage for it's new occupants?\nAnswer:")
            assert fake.text(0)[1].startswith(" Provide the guinea pig with a cage")


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ('kind = "essay"\nprompt = "{q}"', "kind='essay' is not a kind of task. Use one of choice, match, answer"),
        ('kind = "match"', "lacks 'prompt', which every task needs"),
        (MATCH + 'promt = "x"', "promt is not a key of a match task. Did you mean 'prompt'?"),
        (MATCH + "shots = -1", "shots=-1 must be at least 0"),
        (MATCH + "shots = 1.5", "shots=1.5 must be a whole number"),
        (MATCH + "delimiter = 3", "delimiter=3 must be a text"),
        (ANSWER + "max_tokens = 0", "max_tokens=0 must be at least 1"),
        (ANSWER + 'stop = "x"', "stop='x' must be a list of texts"),
        (ANSWER + "[extract.a]\npattern = '('", "is not a regular expression"),
        (ANSWER + "[extract.a]\nregex = 'x'", r"\[extract.a\] takes a pattern"),
        (ANSWER + "[extract.a]\npattern = 'x'\nwhich = 'third'", "which='third' must be first or last"),
        ("kind = ", "is not valid TOML"),
    ],
)
def test_descriptions_that_break_a_rule_are_refused(tmp_path: Path, description: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        task(tmp_path, [{"q": "x", "t": "y"}], description)


@pytest.mark.parametrize(
    ("description", "record", "sentence"),
    [
        (CHOICE, {"q": "x", "choices": ["a", "b"], "gold": 2}, "line 1 names choice 2, and it has 2 choices, counted from 0"),
        (CHOICE, {"q": "x", "choices": ["a", "b"], "gold": -1}, "names choice -1"),
        (CHOICE, {"q": "x", "choices": ["a", "b"], "gold": True}, "'gold' is True, which is not one of"),
        (CHOICE, {"q": "x", "choices": ["a"], "gold": 0}, "must have a list of two or more texts"),
        (CHOICE, {"q": "x", "choices": ["a", ""], "gold": 0}, "must have a list of two or more texts"),
        (CHOICE, {"q": "x", "choices": ["a", "b"]}, "has no 'gold', which the task needs. Known: choices, q"),
        (CHOICE, {"question": "x"}, "has no 'choices'"),
        (MATCH, {"q": "x"}, "has no 't'"),
        (MATCH, {"q": "x", "t": ""}, "the target '{t}' is empty"),
        (MATCH, {"q": ["x"], "t": "y"}, "'q' is list; a template takes text or numbers"),
        (MATCH, ["x"], "holds list; a record is a JSON object"),
        (ANSWER + "[extract.a]\npattern = '#'", {"q": "x", "t": "y"}, "extract 'a' finds no answer in the record's target"),
    ],
)
def test_records_that_a_task_cannot_read_are_named(tmp_path: Path, description: str, record: Any, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        task(tmp_path, [record], description).run(Fake(written=["z"]))
    assert sentence in str(caught.value)


def test_files_that_are_not_there_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task 'arc_eazy' is not known\. Did you mean 'arc_easy'"):
        load_task("arc_eazy")
    with pytest.raises(ConfigError, match=r"nowhere\.toml is missing"):
        load_task(str(tmp_path / "nowhere.toml"))
    with pytest.raises(DataError, match=r"llmfoundry_copa\.jsonl, which is not in .*eval\. Put it there, or name its folder"):
        load_task("copa")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no record"):
        read_records(tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2 is not JSON"):
        read_records(tmp_path / "bad.jsonl")
    assert len(read_records(tmp_path / "bad.jsonl", 1).rows) == 1
    (tmp_path / "half.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n')
    with pytest.raises(DataError, match=r"line 2 holds half of a surrogate pair"):
        read_records(tmp_path / "half.jsonl")
    with pytest.raises(ConfigError, match="limit=0 must be at least 1"):
        task(tmp_path, [{"q": "x", "t": "y"}], MATCH).run(Fake(), limit=0)


def test_results_of_other_questions_have_another_key(tmp_path: Path) -> None:
    records = [{"q": "x", "t": "y"}, {"q": "z", "t": "y"}]

    def key(description: str, limit: int | None = None) -> str:
        result: TaskResult = task(tmp_path, records, description).run(Fake(), limit)
        return result.key

    assert key(MATCH) == key(MATCH)
    assert len({key(MATCH), key(MATCH, 1), key(MATCH + 'delimiter = "-"'), key(MATCH + "shots = 1")}) == 4


def test_extract_takes_the_first_group_that_matched() -> None:
    either = Extract("(a)|(b)", "last")
    assert either("a b") == "b"
    assert either("c") is None
    assert Extract("x.")("xyxz") == "xy"
