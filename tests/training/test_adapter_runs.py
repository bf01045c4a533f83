"""Runs of methods "lora", "qlora" and "full" from a small model, on conversations and on text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from published_layouts import LAYOUTS, rewrite
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, CorruptFileError, Interrupted
from twostroke.core.profile import MachineProfile
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.data.tokenizer import load_tokenizer
from twostroke.interop.import_model import import_model
from twostroke.model.adapters import all_targets, peft_names
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.load import load_model, load_state
from twostroke.model.save import save_model
from twostroke.planner.work.params import count_parameters
from twostroke.training.checkpoint import list_checkpoints, load_checkpoint
from twostroke.training.finish import TrainingResult
from twostroke.training.start import train

Make = Callable[..., TrainRecipe]


@pytest.fixture
def base(tokenizer: Path, tmp_path: Path) -> Path:
    vocabulary = load_tokenizer(tokenizer).get_vocab_size()
    spec = ModelSpec(
        "llama", vocabulary, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_positions=96,
        tied_embeddings=True, eos_token_ids=(0,),
    )  # fmt: skip
    decoder = Decoder(spec)
    initialise(decoder, 7)
    return save_model(decoder, spec, tmp_path / "base", "fp32", tokenizer)


@pytest.fixture
def mixture(tokenizer: Path, tmp_path: Path) -> Path:
    """Experts in the second layer, with a shared one."""
    spec = ModelSpec(
        "qwen2_moe", load_tokenizer(tokenizer).get_vocab_size(), n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8,
        d_ff=48, max_positions=96, tied_embeddings=True, eos_token_ids=(0,), qkv_bias=True,
        moe=MoeSpec(5, 2, 24, n_shared_experts=1, d_shared=40, layers=(1,), shared_gate=True),
    )  # fmt: skip
    decoder = Decoder(spec)
    initialise(decoder, 7)
    return save_model(decoder, spec, tmp_path / "mixture", "fp32", tokenizer)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    records = [{"instruction": f"def {i} if", "output": f"return {i} while not {i % 3}"} for i in range(60)]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


@pytest.fixture
def make(base: Path, chats: Path, tmp_path: Path) -> Make:
    def recipe(
        name: str = "run", method: str = "lora", lora: dict[str, Any] | None = None, on: Path = base, **train: Any
    ) -> TrainRecipe:
        settings = {"steps": 4, "batch_size": 2, "sequence_length": 64, "compile": False, "dtype": "fp32", "weight_decay": 0.0}
        return recipe_from_dict(
            {
                "method": method,
                "output": str(tmp_path / name),
                "model": {"init_from": str(on)},
                "data": {"sources": [str(chats)], "layout": "alpaca"},
                "train": settings | {"learning_rate": 1e-2} | train,
            }
            | ({"lora": lora or {"rank": 4, "alpha": 8.0}} if method != "full" else {})
        )

    return recipe


def _log(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def _last(result: TrainingResult) -> Path:
    return list_checkpoints(result.directory / "checkpoints")[-1][1]


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_quantised_base_trains_as_the_numbers_that_it_stands_for(method: str, make: Make, base: Path, tmp_path: Path) -> None:
    rewrite(base, tmp_path / "gptq", LAYOUTS["gptq-4-32-asym"])
    import_model(tmp_path / "gptq", tmp_path / "numbers")
    losses, models = [], []
    for name in ("gptq", "numbers"):
        recipe = make(f"on-{name}", method=method)
        result = train(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, init_from=str(tmp_path / name))))
        losses.append([record["loss"] for record in _log(result.directory)])
        models.append(load_model(result.model))
    assert losses[0] == losses[1]
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.equal(models[0](tokens), models[1](tokens))
    if method != "full":  # the engine computes with what was merged, which is no codes
        assert "quantization_config" not in json.loads((tmp_path / "on-gptq" / "model" / "config.json").read_text())


@pytest.mark.parametrize(
    ("method", "dtype", "lora"),
    [
        ("lora", "fp32", {"rank": 4, "dropout": 0.3}),
        ("lora", "bf16", {"rank": 4, "targets": ["q_proj", "v_proj"]}),
        ("qlora", "bf16", {"rank": 4, "dropout": 0.1}),
        ("lora", "pure_bf16", {"rank": 4}),
        ("qlora", "fp16", {"rank": 4}),
        ("qlora", "fp32", {"rank": 2, "double_quantization": False, "nf4_block": 32}),
        ("full", "bf16", None),
    ],
)
def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(make: Make, method: str, dtype: str, lora: Any) -> None:
    settings: dict[str, Any] = {"method": method, "dtype": dtype, "lora": lora, "steps": 6, "grad_accumulation": 2}
    whole = train(make("whole", **settings))
    recipe = make("resumed", **settings)
    for number, step in enumerate((2, 3)):
        with pytest.raises(Interrupted):
            train(recipe, resume=number > 0, should_stop=lambda done, at=step: done == at)
    resumed = train(recipe, resume=True)
    names = ("step", "loss", "grad_norm", "tokens", "epoch")
    assert [[r[n] for n in names] for r in _log(resumed.directory)] == [[r[n] for n in names] for r in _log(whole.directory)]
    ends = [load_checkpoint(_last(result)) for result in (resumed, whole)]
    for part in ("weights", "optimizer"):
        a, b = (getattr(end, part) for end in ends)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    files = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert (resumed.model / files).read_bytes() == (whole.model / files).read_bytes()
    losses = [r["loss"] for r in _log(whole.directory)]
    assert len(set(losses)) == 6
    assert losses[-1] < losses[0]


def test_checkpoints_hold_adapters_and_their_optimizer_and_nothing_else(make: Make) -> None:
    result = train(make())
    checkpoint = load_checkpoint(_last(result))
    spec, _ = load_state(result.model)
    assert set(checkpoint.weights) == set(peft_names(list(all_targets(spec))))
    assert {key.partition("::")[0] for key in checkpoint.optimizer} == set(checkpoint.weights)
    assert result.summary["n_trained_parameters"] == sum(w.numel() for w in checkpoint.weights.values())
    assert result.summary["measurement"]["model_bytes"] < (result.directory.parent / "base/model.safetensors").stat().st_size


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_written_model_is_what_was_trained(make: Make, method: str) -> None:
    """Merged on loading, its loss on the next batch is that of the decoder that was training."""
    from twostroke.training.adapters import load_adapted
    from twostroke.training.precision import MasterWeights

    recipe = make(method=method)
    result = train(recipe)
    decoder = load_adapted(recipe, torch.device("cpu"))
    MasterWeights(decoder, torch.float32).load(load_checkpoint(_last(result)).weights)
    tokens = torch.arange(40)[None] % 200
    with torch.no_grad():
        unmerged, merged = decoder.eval()(tokens), load_model(result.model)(tokens)
    assert (merged - unmerged).abs().max() <= 1e-4 * unmerged.abs().max()


def test_the_average_of_adapters_is_written_as_adapters(make: Make) -> None:
    result = train(make(ema_decay=0.5, activation_checkpointing="selective"))
    average, own = (load_model(result.directory / name) for name in ("model-ema", "model"))
    assert not torch.equal(average.blocks[0].attn.qkv.weight, own.blocks[0].attn.qkv.weight)
    assert torch.equal(average.embed.weight, own.embed.weight)  # of the base, which does not move


def test_a_base_that_changed_meanwhile_stops_the_resume(make: Make, base: Path) -> None:
    recipe = make()
    with pytest.raises(Interrupted):
        train(recipe, should_stop=lambda step: step == 2)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptFileError, match="have changed since the run began"):
        train(recipe, resume=True)


def test_the_loss_counts_the_assistants_tokens_only(make: Make, base: Path) -> None:
    """With fresh adapters and no learning rate to speak of, the first loss is the base's mean over the answers' tokens."""
    recipe = make(steps=1, batch_size=1, learning_rate=1e-30)
    result = train(recipe)
    decoder, tokenizer = load_model(base), load_tokenizer(base)
    from twostroke.data.prepare import prepare
    from twostroke.training.conversations import make_loader
    from twostroke.training.resolve import with_own_tokenizer

    with_tokenizer = with_own_tokenizer(recipe)
    batch = make_loader(prepare(with_tokenizer.data), with_tokenizer, lambda line: None).next_batch()
    nats: list[float] = []
    ids, document = batch.tokens[0], batch.documents[0]
    for number in range(int(document.max()) + 1):
        own = ids[document == number]
        text = tokenizer.decode(own.tolist(), skip_special_tokens=False)
        if "Assistant:" not in text:
            continue  # padding
        prompt = text[: text.index("Assistant:") + len("Assistant:")]
        n_prompt = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
        with torch.no_grad():
            logarithms = torch.log_softmax(decoder(own[None])[0], dim=-1)
        nats += [-float(logarithms[i - 1, own[i]]) for i in range(n_prompt, len(own))]
    assert batch.n_valid == len(nats)
    assert _log(result.directory)[0]["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("lora", "sentence"),
        [
            ({"rank": 0}, r"lora.rank=0 must be at least 1"),
            ({"rank": 33}, r"lora.rank=33 is above the rank of every target: \w+ is \d+ × \d+. Use at most 32"),
            ({"targets": ["q_pro"]}, r"no matrix 'q_pro'. Did you mean 'q_proj'"),
            ({"targets": []}, "lora.targets is empty"),
            ({"dropout": 1.0}, "lora.dropout=1.0 must be"),
            ({"alpha": 0.0}, "lora.alpha=0.0 must be above 0"),
            ({"nf4_block": 63}, "lora.nf4_block=63 must be even"),
            ({"rnak": 3}, r"lora.rnak is not known. Did you mean 'rank'"),
        ],
    )
    def test_bad_adapters_get_a_sentence_before_anything_is_made(
        self, make: Make, tmp_path: Path, lora: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ConfigError, match=sentence):
            train(make(lora=lora))
        assert not (tmp_path / "run").exists()

    def test_adapters_on_adapters(self, make: Make) -> None:
        first = make("first")
        train(first)
        second = plain(make("second"))
        second["model"]["init_from"] = str(Path(first.output) / "model")
        with pytest.raises(ConfigError, match=r"holds adapters. Merge them into their base first"):
            train(recipe_from_dict(second))

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"method": "lora", "model": {}}, 'method="lora" fine-tunes an existing model'),
            ({"method": "full", "lora": {"rank": 3}}, "is set, but method=.full. trains no adapters"),
            ({"data": {"layout": "alpaca", "sources": ["stdlib"]}}, 'names "stdlib"'),
            ({"data": {"chat_template": "x.jinja"}}, "and the layout is .text."),
            ({"model": {"n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}, "method": "pretrain",
              "data": {"layout": "messages", "sources": ["x.json"]}}, "needs a tokenizer that knows"),
        ],
    )  # fmt: skip
    def test_recipes_that_do_not_go_together(self, changes: dict[str, Any], sentence: str) -> None:
        table = {"method": "lora", "model": {"init_from": "base"}, "train": {"steps": 1}} | changes
        with pytest.raises(ConfigError, match=sentence):
            recipe_from_dict(table)


def test_adapters_on_plain_text(make: Make, corpus: Path) -> None:
    table = plain(make("text"))
    table["data"] |= {"layout": "text", "sources": [str(corpus)]}
    result = train(recipe_from_dict(table))
    assert (result.model / "adapter_config.json").is_file()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_memory_and_operations_are_predicted_for_the_method(make: Make, profile: MachineProfile, method: str) -> None:
    result = train(make(method=method, dtype="bf16", lora={"rank": 4, "targets": ["q_proj", "down_proj"]}))
    predicted, measured = result.summary["prediction"], result.summary["measurement"]
    # Exactly, but for the optimizer's counter a tensor, and in NF4 the four bytes a matrix of the scales' mean.
    assert measured["weights_bytes"] == pytest.approx(predicted["weights_bytes"], rel=0.005)
    assert measured["gradients_bytes"] == predicted["gradients_bytes"]
    assert measured["optimizer_bytes"] == pytest.approx(predicted["optimizer_bytes"], rel=0.01)
    peak = profile.peak_flop_per_s[result.summary["compute_dtype"]]
    n = result.summary["n_trained_parameters"]
    assert n == 2 * 4 * ((32 + 32) + (48 + 32))  # layers · rank · (inputs + outputs) of q_proj and down_proj
    frozen = 4 * count_parameters(load_state(result.model)[0]).in_products  # forward, and the gradient of its input
    assert measured["mfu"] == pytest.approx((frozen + 6 * n + 6 * 2 * 32 * 64) * measured["train_tok_per_s"] / peak)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_of_adapters_can_be_looked_into_and_ends_the_same(make: Make, method: str) -> None:
    lora = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
    plain = train(make("plain", method=method, lora=lora))
    seeing = {"diagnostics_every": 2, "sample_every": 2, "sample_prompts": ["def 3 if"]}
    watched = train(make("watched", method=method, lora=lora, **seeing))
    ends = [load_checkpoint(list_checkpoints(r.directory / "checkpoints")[-1][1]).weights for r in (plain, watched)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    line = _log(watched.directory)[1]
    assert line["update_ratios"].keys() == {"blocks.0", "blocks.1"}  # of the adapters; the base does not move
    assert len(line["activations"]["mlp_rms"]) == 2
    samples = [json.loads(text) for text in (watched.directory / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [(2, "def 3 if"), (4, "def 3 if")]


EXPERTS: dict[str, Any] = {"rank": 3, "targets": ["all-linear", "gate_up_proj", "down_proj"], "dropout": 0.1}


class TestExperts:
    @pytest.mark.parametrize(("method", "dtype"), [("lora", "fp32"), ("qlora", "bf16"), ("qlora", "fp16")])
    def test_a_resumed_run_is_the_uninterrupted_one(self, make: Make, mixture: Path, method: str, dtype: str) -> None:
        settings: dict[str, Any] = {"method": method, "dtype": dtype, "lora": EXPERTS, "on": mixture, "steps": 6}
        whole = train(make("whole", **settings))
        with pytest.raises(Interrupted):
            train(make("resumed", **settings), should_stop=lambda done: done == 3)
        resumed = train(make("resumed", **settings), resume=True)
        files = [(result.model / "adapter_model.safetensors").read_bytes() for result in (whole, resumed)]
        assert files[0] == files[1]
        losses = [record["loss"] for record in _log(whole.directory)]
        assert losses[-1] < losses[0]

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_the_written_model_is_what_was_trained(self, make: Make, mixture: Path, method: str) -> None:
        from twostroke.training.adapters import load_adapted
        from twostroke.training.precision import MasterWeights

        recipe = make(method=method, lora=EXPERTS, on=mixture)
        result = train(recipe)
        decoder = load_adapted(recipe, torch.device("cpu"))
        weights = load_checkpoint(_last(result)).weights
        MasterWeights(decoder, torch.float32).load(weights)
        tokens = torch.arange(40)[None] % 200
        with torch.no_grad():
            unmerged, merged = decoder.eval()(tokens), load_model(result.model)(tokens)
        assert (merged - unmerged).abs().max() <= 1e-4 * unmerged.abs().max()
        moved = weights["blocks.1.mlp.expert_down.adapters.down_proj.b"].unflatten(0, (5, -1)).abs().amax(dim=(1, 2))
        assert (moved > 0).all()  # of every expert

    def test_what_they_hold_is_predicted(self, make: Make, mixture: Path, profile: MachineProfile) -> None:
        for method in ("lora", "qlora"):
            result = train(make(method, method=method, dtype="bf16", lora=EXPERTS, on=mixture))
            predicted, measured = result.summary["prediction"], result.summary["measurement"]
            # Small scales of small matrices: their own scale and mean are four bytes each, an expert (831 of 72,960 in fp32).
            assert measured["weights_bytes"] == pytest.approx(predicted["weights_bytes"], rel=0.012)
            assert measured["gradients_bytes"] == predicted["gradients_bytes"]
            assert measured["optimizer_bytes"] == pytest.approx(predicted["optimizer_bytes"], rel=0.01)
