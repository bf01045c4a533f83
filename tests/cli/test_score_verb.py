"""``twostroke score``: log-probabilities of texts, as a table and as JSON; what cannot be scored is one sentence."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from real_model import make_model
from twostroke.cli.main import main
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.evaluation.encoding import Encoder

TEXT = "    parser.add_argument('name')\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["score", *args, "--threads", "1"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(caught.value.code or 0), out, err


def test_scores_are_the_decoders(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(TEXT * 3)
    args = (str(model), "--text", TEXT, "--file", str(tmp_path / "t.txt"), "--prompt", "def main(", "--dtype", "fp32", "--json")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    first, second = json.loads(out)["scores"]
    assert (first["text"], second["text"]) == (TEXT, TEXT * 3)
    decoder = DecoderScorer.load(model)
    for found in (first, second):
        pair = Encoder(decoder).pair("def main(", found["text"])
        ((nats, greedy),) = decoder.token_scores([(pair.ids, pair.first)])
        assert found["token_logprobs"] == pytest.approx((-nats).tolist(), abs=1e-4)  # fp32 sums in another order
        assert found["token_ids"] == pair.ids[pair.first :]
        assert found["is_greedy"] == bool(greedy.all())
        assert found["score"] == math.fsum(found["token_logprobs"])
        assert found["perplexity"] == pytest.approx(math.exp(-found["score"] / len(found["token_ids"])))
        assert found["bits_per_byte"] == pytest.approx(-found["score"] / math.log(2) / len(found["text"]))
        assert "".join(found["tokens"]).endswith(found["text"])


def test_text_comes_from_stdin_and_tokens_have_lines(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, out, err = run(capsys, str(model), "--tokens")
    assert code == 0, err
    head, *tokens, last = out.splitlines()
    assert head.startswith("[1] ln p -")
    assert repr(TEXT) in head
    n = int(head.split(" tokens")[0].rpartition(" ")[2])
    assert len(tokens) == n
    assert last.startswith(("bf16", "fp32"))


def test_what_cannot_be_scored_is_one_sentence(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    cases = (
        (["--text", ""], 2, "--text"),
        (["--file", str(tmp_path / "latin")], 2, f"the text of {tmp_path / 'latin'} is not UTF-8. Convert it."),
        (["--file", str(tmp_path / "nowhere")], 2, f"{tmp_path / 'nowhere'}: No such file or directory. Check the path."),
        (["--file", str(tmp_path)], 2, f"{tmp_path}: Is a directory. Check the path."),
        (["--text", TEXT * 100], 2, "`twostroke eval MODEL --data FILE`, which reads longer texts in windows."),
    )
    for options, expected, sentence in cases:
        code, out, err = run(capsys, str(model), *options)
        assert (code, out) == (expected, ""), err
        assert sentence in err.splitlines()[-1]
