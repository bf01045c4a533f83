"""Scores with the decoder, training's definition of the model, in batches of sequences of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from twostroke.core.errors import InputError, TwostrokeError
from twostroke.core.policy import SCORED_TOKENS_PER_PASS
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.engine.scoring import TokenScores, check_ids
from twostroke.evaluation.decoder_pass import in_eval_mode, score_rows
from twostroke.evaluation.scorer import Progress
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model


class DecoderScorer:
    """A ``Scorer`` on the decoder. Rows of a batch are padded on the right, where causal attention never looks, so no mask is
    needed."""

    engine = "decoder"

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.decoder, self.tokenizer, self.spec = decoder, tokenizer, decoder.spec
        self.longest = decoder.spec.max_positions
        self.dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[decoder.head_weight.dtype]
        self.formats = self.dtype

    @classmethod
    def load(cls, directory: Path, dtype: str = "fp32", device: str = "cpu") -> DecoderScorer:
        return cls(load_model(directory, dtype, device), load_tokenizer(directory))

    @torch.no_grad()
    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        """As ``engine.scoring.token_scores``; tests/evaluation/test_scorers.py compares the two."""
        for ids, first in sequences:
            self._check(ids, first)
        results: list[TokenScores] = [(np.empty(0, np.float32), np.empty(0, np.bool_))] * len(sequences)
        # The longest go first, so that a lack of memory shows at once and not at the end.
        order = sorted((i for i, (ids, first) in enumerate(sequences) if first < len(ids)), key=lambda i: -len(sequences[i][0]))
        n_total, n_done = sum(len(sequences[i][0]) - 1 for i in order), 0
        with in_eval_mode(self.decoder):
            begin = 0
            while begin < len(order):
                length = len(sequences[order[begin]][0]) - 1
                chosen = order[begin : begin + max(1, SCORED_TOKENS_PER_PASS // length)]
                begin += len(chosen)
                for i, scores in zip(chosen, self._pass([sequences[i] for i in chosen]), strict=True):
                    results[i] = scores
                n_done += sum(len(sequences[i][0]) - 1 for i in chosen)
                if progress is not None:
                    progress(n_done / n_total)
        return results

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        """Greedy continuations without a KV cache, so each token costs a pass over all tokens before it. It is for short
        answers, and the reference for the other engine."""
        texts = []
        with in_eval_mode(self.decoder):
            for i, prompt in enumerate(prompts):
                texts.append(self._continue(list(prompt), max_tokens, stop))
                if progress is not None:
                    progress((i + 1) / len(prompts))
        return texts

    @torch.no_grad()
    def _continue(self, ids: list[int], max_tokens: int, stop: Sequence[str]) -> str:
        self._check(ids, 1)
        detokenizer = IncrementalDetokenizer(self.tokenizer, tuple(stop), (), 0, ids)
        weight, text = self.decoder.head_weight, ""
        for _ in range(min(max_tokens, self.longest - len(ids))):
            tokens = torch.tensor([ids], device=weight.device)
            token = int(self.decoder.logits(self.decoder.hidden(tokens)[0, -1]).argmax())
            if token in self.spec.eos_token_ids:
                break
            ids.append(token)
            text += detokenizer.add([token])
            if detokenizer.stopped:
                return text
        return text + detokenizer.finish()

    def _pass(self, batch: Sequence[tuple[Sequence[int], int]]) -> list[TokenScores]:
        weight = self.decoder.head_weight
        length = max(len(ids) for ids, _ in batch) - 1
        tokens = np.zeros((len(batch), length), np.int64)
        for row, (ids, _) in enumerate(batch):
            tokens[row, : len(ids) - 1] = ids[:-1]
        hidden = self.decoder.hidden(torch.from_numpy(tokens).to(weight.device))
        counts = [len(ids) - first for ids, first in batch]
        rows = np.repeat(np.arange(len(batch)), counts)
        columns = np.concatenate([np.arange(first - 1, len(ids) - 1) for ids, first in batch])
        targets = np.concatenate([np.asarray(ids[first:], np.int64) for ids, first in batch])
        parts = score_rows(_scores_of, self.decoder, hidden, (rows, columns), targets)
        nats, greedy = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if not np.isfinite(nats).all():
            raise TwostrokeError("the model's output was not finite. The weights may be damaged.")
        ends = np.cumsum(counts)[:-1]
        return list(zip(np.split(nats, ends), np.split(greedy, ends), strict=True))

    def _check(self, ids: Sequence[int], first: int) -> None:
        check_ids(ids, first, self.decoder.head_weight.shape[0])
        if len(ids) - 1 > self.longest:
            raise InputError(
                f"a sequence of {len(ids)} tokens is longer than the model's max_positions={self.longest} + 1. Cut it."
            )


def _scores_of(logits: Tensor, targets: Tensor) -> TokenScores:
    """The scores of ``targets`` (n,) by fp32 ``logits`` (n, V)."""
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return nats.cpu().numpy(), (logits.argmax(dim=-1) == targets).cpu().numpy()
