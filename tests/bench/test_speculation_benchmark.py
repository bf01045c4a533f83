"""benchmarks/speculation: what its model is trained on and asked, and when an aim counts as reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import script

corpora = script("speculation/corpora.py")
run = script("speculation/run.py")

SENTENCES = "Mr. Bun{0} went to the {1} house on the hill. He did not come back for a long time, and nobody asked him why."


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora of the shared assets' layout, in small."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "books").mkdir()
    for book in "abcd":
        paragraphs = [SENTENCES.format(i, word) + " It rained." * 20 for i, word in enumerate(("old", "new", "red", "far") * 6)]
        text = (
            "A licence.\n\n*** START OF THIS BOOK ***\n\nI\n\n"
            + "\n\n".join(paragraphs)
            + "\n\n*** END OF THIS BOOK ***\n\nA licence."
        )
        (folder / "books" / f"{book}.txt").write_text(text)
    (folder / "instruction").mkdir()
    records = [{"instruction": f"What is {i}?", "input": "", "output": f"It is the number {i}, a number."} for i in range(60)]
    (folder / "instruction" / "an_alpaca_demo.json").write_text(json.dumps(records))
    asked = "Below is an instruction.\n\n### Instruction:\nWhat is a page?\n\n### Response:\n"
    line = {"prompt": asked, "response": "A page is a side of paper."}
    (folder / "instruction" / "dolly_small.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_a_summary_is_the_first_sentences_of_its_passage(shared: Path) -> None:
    made = corpora.summaries(shared / "books")
    for text in made[corpora.TRAIN]:
        passage, summary = text.split(corpora.IN_SHORT)
        firsts = [paragraph[: paragraph.index(" He did")] for paragraph in passage.split("\n\n")]
        assert summary == " ".join(firsts) + "\n"
    assert all(text.endswith(corpora.IN_SHORT) for text in made[corpora.HELD_OUT])
    assert "licence" not in "".join(made[corpora.TRAIN] + made[corpora.HELD_OUT])


def test_a_held_out_chat_ends_where_the_answer_begins(shared: Path) -> None:
    made = corpora.chats(shared / "instruction")
    told = "".join(made[corpora.TRAIN])
    assert len(made[corpora.HELD_OUT]) == 3
    for text in made[corpora.HELD_OUT]:
        assert text.endswith(f"?\n\n{corpora.ASSISTANT}")
        assert text.count(corpora.USER) == 3
        assert text[:40] not in told


def test_what_is_written_is_read_again_and_trained_on(shared: Path, tmp_path: Path) -> None:
    corpora.write(shared, tmp_path)
    assert corpora.held_out(tmp_path, "chats") == corpora.chats(shared / "instruction")[corpora.HELD_OUT]
    data = corpora.recipe(tmp_path, tmp_path / "out", 3, n_layers=4, d_model=256)["data"]
    assert all(Path(file).is_file() for file in (*data["sources"], *data["held_out"]))
    assert not set(data["sources"]) & set(data["held_out"])


def test_missing_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has 0 \.txt files; 3 are needed"):
        corpora.summaries(tmp_path)
    with pytest.raises(SystemExit, match="has 0 short questions with answers"):
        corpora.chats(tmp_path)


@pytest.mark.parametrize(
    ("ratio", "aim", "met"), [(1.9, 1.9, True), (1.894, 1.9, False), (0.98, 1.0, True), (0.97, 1.0, False)]
)
def test_an_aim_is_reached_by_the_median(ratio: float, aim: float, met: bool) -> None:
    row = {"dtype": "bf16", "text": "code", "requests": 1, "drafts": "ngram", "aim": aim, "drafted": 0, "right": 0}
    row |= {f"{rate}{end}": 1.0 for rate in ("tok_per_s", "decode_tok_per_s") for end in ("", "_off", "_ratio")}
    row |= {"tok_per_s_ratio": ratio, "tok_per_s_ratios": [ratio], "steps": 1, "steps_off": 1}
    text = run.summary({"machine": "2 × X", "rounds": 1, "n_parameters": 4_200_000, "steps": 3, "rows": [row]})
    assert ("**missed**" in text) is not met
    assert "4,200,000 parameters, trained for 3 steps" in text
    assert f"{int(met)} of 1 medians reach their aim." in text
