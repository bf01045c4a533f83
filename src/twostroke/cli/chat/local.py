"""Answers by a model that runs in this process."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.cli.chat.conversation import NEXT_SPEAKER, Answer, Message
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, DataError
from twostroke.data.chat import ChatTemplate, read_chat_template
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams


class LocalModel:
    """The model in ``directory``, with the first of ``adapters`` if there is one. Raises what ``LLM`` raises."""

    stops_at_once = False  # an exception in the middle of a step would leave the engine's state half changed

    def __init__(self, directory: Path, adapters: Mapping[str, Path], settings: EngineSettings) -> None:
        source, self._variables = read_chat_template(directory)
        self._template = ChatTemplate(source)
        self._template.start()
        self.has_template = source is not None
        self._llm = LLM(directory, adapters, **settings.changed())
        if self._llm.tokenizer is None:
            raise DataError(f"{directory} has no tokenizer.json, which a chat needs. Add it.")
        self._lora = next(iter(adapters), None)
        self.name = self._lora or directory.resolve().name
        self.notes = self._llm.engine.spec.notes

    def pieces(
        self, messages: Sequence[Message], settings: Mapping[str, int | float], into: Answer
    ) -> Generator[str, None, None]:
        """Text as it is generated; ``into`` grows with it. Raises CapacityError before the first piece if the
        conversation leaves no room in the context."""
        assert self._llm.tokenizer is not None
        text = self._template.render(messages, **self._variables)
        ids = self._llm.tokenizer.encode(text, add_special_tokens=not self.has_template).ids  # a template writes its own
        longest = self._llm.engine.max_model_len
        room = longest - len(ids)
        if room < 1:
            raise CapacityError(f"the conversation has {len(ids)} tokens, and the model's context is {longest}.")
        max_tokens = int(settings.get("max_tokens", room))
        given: dict[str, Any] = {**settings, "max_tokens": min(max_tokens, room)}
        params = SamplingParams(**given, stop=() if self.has_template else (NEXT_SPEAKER,))
        began = time.perf_counter()
        for delta in self._llm.stream([ids], params, lora=self._lora):
            into.elapsed_s = time.perf_counter() - began
            into.ttft_s = into.ttft_s or into.elapsed_s
            into.output_tokens += len(delta.token_ids)
            into.finish_reason = delta.finish_reason
            into.is_full = delta.finish_reason == "length" and max_tokens >= room
            into.text += delta.text
            yield delta.text

    def close(self) -> None:
        self._template.close()
        self._llm.close()
