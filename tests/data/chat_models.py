"""A tokenizer with ChatML's special tokens, as a directory, and templates for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from twostroke.data.tokenizer import train_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same with the marks by which transformers finds the assistant's tokens."""

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As those of reasoning models: the last answer is rendered otherwise than it will be once it is an earlier one."""

WORDS = "the dog and the cat: what is a list? A list holds things, in order. 日本 naïve façade  two   spaces\n" * 20
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "what is a list?"},
    {"role": "assistant", "content": "A list holds  things,\n\n in order.   "},
    {"role": "user", "content": "and naïve 日本?"},
    {"role": "assistant", "content": "日本 the façade"},
]


def make_chat_tokenizer(directory: Path, template: str | None = CHATML, **config: Any) -> Path:
    """``directory`` with tokenizer.json and tokenizer_config.json. A message ends with an end of text, as in many chat
    models."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "tokenizer.json"
    tokenizer = train_tokenizer(iter([WORDS]), 330, file)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(file))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
