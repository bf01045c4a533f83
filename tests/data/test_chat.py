from __future__ import annotations

import pytest

from twostroke.core.errors import InputError
from twostroke.data.chat import render_chat

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "<b>"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_default_is_plain_and_open_ended() -> None:
    assert render_chat(None, MESSAGES) == "User: hi\nAssistant: yes?\nUser: <b>\nAssistant:"
    assert render_chat(None, MESSAGES[:1], add_generation_prompt=False) == "User: hi\n"


def test_templates_render_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tricky = (
        "{{ bos_token }}\n  {% for m in messages %}\n{{ loop.index0 }} {{ m.content | tojson }}\n"
        "    {% if loop.last %}{% break %}{% endif %}\n  {% endfor %}{{ messages | length * 2 }}{{ '%s!' }}\n{{ 7 % 4 }}"
    )
    for template in (CHATML, tricky):
        for prompt in (True, False):
            expected = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=prompt, bos_token="<s>")
            assert render_chat(template, MESSAGES, prompt, bos_token="<s>") == expected[0][0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ undefined_name.attribute }}",
        "{{ messages[0].content + 1 }}",
        "x" * (2**20 + 1),
    ],
)
def test_templates_that_reach_out_swell_or_refuse_are_sentences(template: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        render_chat(template, MESSAGES)


def test_a_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(InputError, match=r"does not take these messages: roles must alternate\."):
        render_chat("{{ raise_exception('roles must alternate') }}", MESSAGES)
