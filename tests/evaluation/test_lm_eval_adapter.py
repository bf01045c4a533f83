"""What lm-eval asks, without it; and with it where it is installed: one task by us, by it through us, and by it alone."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from real_model import greedy_reference, make_model
from twostroke.core.errors import ConfigError, InputError
from twostroke.evaluation.engines import open_scorer
from twostroke.evaluation.lm_eval_adapter import Adapter, language_model
from twostroke.evaluation.scorer import Scorer
from twostroke.evaluation.task_files import load_task
from twostroke.model.load import load_model

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


@dataclass
class Asked:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=["decoder", "inference"])
def scorer(model: Path, request: pytest.FixtureRequest) -> Scorer:
    return open_scorer(model, request.param, "fp32")


def test_likelihoods_are_sums_of_logarithms(model: Path, scorer: Scorer) -> None:
    decoder, tokenizer = load_model(model), scorer.tokenizer
    asked = [("def main(", "self):"), ("import sys ", "x"), ("", "class")]
    found = Adapter(scorer).loglikelihood([Asked(args) for args in asked])
    for (context, continuation), (total, greedy) in zip(asked, found, strict=True):
        before = tokenizer.encode(context.rstrip()).ids or [0]
        ids = before + tokenizer.encode(context + continuation).ids[len(before) if context else 0 :]
        with torch.no_grad():
            rows = torch.log_softmax(decoder(torch.tensor([ids]))[0], -1)[len(before) - 1 : -1]
        assert total == pytest.approx(float(rows.gather(1, torch.tensor(ids[len(before) :])[:, None]).sum()), abs=1e-3)
        assert greedy == (rows.argmax(-1).tolist() == ids[len(before) :])


def test_rolling_scores_each_token_once_and_sees_what_fits(model: Path, scorer: Scorer) -> None:
    """Beyond the context of 512 the second window is moved to the left; a text within it is one window."""
    decoder = load_model(model)
    long = "parser.add_argument(name)\n" * 80
    short, ids = "import sys", scorer.tokenizer.encode(long).ids
    assert 512 < len(ids) < 1024
    found = Adapter(scorer).loglikelihood_rolling([Asked((long,)), Asked((short,)), Asked(("",))])
    with torch.no_grad():
        first = torch.log_softmax(decoder(torch.tensor([[0, *ids[:511]]]))[0], -1)
        second = torch.log_softmax(decoder(torch.tensor([ids[-513:-1]]))[0], -1)
    want = sum(float(first[i, ids[i]]) for i in range(512))
    n_left = len(ids) - 512
    want += sum(float(second[512 - n_left + i, ids[512 + i]]) for i in range(n_left))
    assert found[0] == pytest.approx(want, rel=1e-5)
    assert found[1] == pytest.approx(Adapter(scorer).loglikelihood([Asked(("", short))])[0][0], rel=1e-6)
    assert found[2] == 0


def test_generation_is_greedy_up_to_what_the_task_names(model: Path, scorer: Scorer) -> None:
    adapter, tokenizer = Adapter(scorer), scorer.tokenizer
    ids = tokenizer.encode("def main(").ids
    want = tokenizer.decode(ids + greedy_reference(model, ids, 8)[0])[len("def main(") :]
    options: list[dict[str, Any]] = [
        {"until": ["never"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
        {"until": want[3:5], "max_gen_toks": 8},
        {"until": [], "max_new_tokens": 1},
    ]
    texts = adapter.generate_until([Asked(("def main(", o)) for o in options])
    assert texts[0] == want
    assert texts[1] == want[: want.index(want[3:5])]
    assert 0 < len(texts[2]) < len(want)
    for bad in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(InputError, match="greedy decoding alone"):
            adapter.generate_until([Asked(("x", bad))])
    with pytest.raises(InputError, match="num_beams=4 is not supported"):
        adapter.generate_until([Asked(("x", {"num_beams": 4}))])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_a_sentence_says_what_to_install(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'twostroke\[eval\]'"):
        language_model(model)


def lm_eval_task(name: str, file: Path) -> str:
    """lm-eval's description of the task of that name in this package, its data in ``file``. JSON is YAML as well."""
    own: dict[str, dict[str, Any]] = {
        "copa": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}",
            "doc_to_target": "gold",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "lambada": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{context}}",
            "doc_to_target": " {{continuation}}",  # lm-eval puts no delimiter before it
            "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
        },
    }
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return json.dumps({"task": f"own_{name}", **data, **own[name]})


@needs_lm_eval
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("engine", ["decoder", "inference"])
def test_lm_eval_through_us_scores_what_we_score_and_what_it_scores_alone(
    model: Path, engine: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COPA and LAMBADA, 24 questions of each: equal accuracies, and likelihoods to fp32's error."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    names = {"copa": "llmfoundry_copa.jsonl", "lambada": "llmfoundry_lambada_openai.jsonl"}
    for name, file in names.items():
        lines = (assets / "eval" / file).read_text().splitlines()[:24]
        (tmp_path / file).write_text("\n".join(lines))
        (tmp_path / f"own_{name}.yaml").write_text(lm_eval_task(name, tmp_path / file))
    own = language_model(model, engine, "fp32")
    peer = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4)
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluated(lm: Any) -> dict[str, Any]:
        found = lm_eval.simple_evaluate(
            lm, tasks=[f"own_{n}" for n in names], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
        assert found is not None
        return dict(found)

    through_us, alone = evaluated(own), evaluated(peer)
    for name in names:
        ours = load_task(name, tmp_path).run(own.scorer)
        metrics = ours.metrics()
        for result in (through_us, alone):
            row = result["results"][f"own_{name}"]
            assert row["acc,none"] == metrics["acc"].value
            assert row["acc_stderr,none"] == "N/A" or row["acc_stderr,none"] == pytest.approx(metrics["acc"].standard_error)
            if name == "copa":
                assert row["acc_norm,none"] == metrics["acc_norm"].value
            else:
                # Sums of some tokens' nats, each off by 1e-5 where fp32 adds in another order.
                assert row["perplexity,none"] == pytest.approx(metrics["perplexity"].value, rel=1e-3)
        a, b = ([s["filtered_resps"] for s in r["samples"][f"own_{name}"]] for r in (through_us, alone))
        sums = [
            np.array([float(resp[0] if isinstance(resp, list | tuple) else resp) for row in rows for resp in row])
            for rows in (a, b)
        ]
        np.testing.assert_allclose(sums[0], sums[1], atol=2e-3)


@needs_lm_eval
@pytest.mark.filterwarnings("default")
def test_lm_eval_generates_through_us_what_it_generates_alone(model: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    texts = ("def main(", "import os\n", "class Parser:")
    asked = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(texts)]
    rolling = [Instance("loglikelihood_rolling", {}, ("parser.add_argument(name)\n" * 80,), 0)]
    peer = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)
    for engine in ("decoder", "inference"):
        own = language_model(model, engine, "fp32")
        assert own.generate_until(asked) == peer.generate_until(asked)
        assert own.loglikelihood_rolling(rolling)[0] == pytest.approx(peer.loglikelihood_rolling(rolling)[0], rel=1e-5)
    assert json.dumps(own.apply_chat_template([{"role": "user", "content": "x"}]))
