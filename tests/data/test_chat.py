from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jinja2
import psutil
import pytest

from twostroke.core.errors import InputError
from twostroke.data.chat import ChatTemplate, render_chat
from twostroke.data.template_sandbox import compile_template

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
        "{{ raise_exception(5) }}",
        "{{ raise_exception() }}",
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


BOMBS = {
    "+": "{% set ns = namespace(s='abcdefgh') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "~": "{% set ns = namespace(s='abcdefgh') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "ljust": "{{ m.ljust(k ** 3) | length }}",
    "center": "{{ m.center(k ** 3) | length }}",
    "zfill": "{{ m.zfill(k ** 3) | length }}",
    "replace": "{{ ('a' * k * 30).replace('a', 'b' * k * 30) | length }}",
    "format": "{{ ('{:>' ~ k ** 3 ~ '}').format(m) | length }}",
    "percent": "{{ ('%' ~ k ** 3 ~ 's') | format(m) | length }}",
    "indent": "{{ ('a\n' * k * 30) | indent(k * 30) | length }}",
    "tojson": "{{ [[1]] | tojson(indent=k * k * 200) | length }}",
    "lists": "{% set ns = namespace(s=[1, 2]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "slice": "{{ [1] | slice(k ** 3) | list | length }}",
    "lipsum": "{{ lipsum(n=k * k) | length }}",
    "times": "{{ [0] * k ** 3 }}",
}
ON_DEMAND = (
    # k, not a constant: Jinja works constants out when it compiles.
    "{% set m = messages[0].content %}{% set k = 3000 %}{% if m == 'none' %}fine"
    + "".join(f"{{% elif m == '{name}' %}}{bomb}" for name, bomb in BOMBS.items())
    + "{% elif m == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif m == 'power' %}{{ (9 + m | length) ** (9 ** (m | length + 4)) }}"
    "{% elif m == 'encode' %}{{ 'a'.encode('nonsense') }}{% elif m == 'deep' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def on_demand() -> Iterator[ChatTemplate]:
    template = ChatTemplate(ON_DEMAND)
    yield template
    template.close()


def rendered(template: ChatTemplate, content: str) -> str:
    return template.render([{"role": "user", "content": content}])


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "twostroke.data.template_sandbox" in p.cmdline()]


@pytest.mark.parametrize("name", BOMBS)
def test_what_makes_gigabytes_of_a_few_characters_is_a_sentence(on_demand: ChatTemplate, name: str) -> None:
    # Most need more memory than there is; some are stopped by Python's own checks or by the time.
    with pytest.raises(InputError, match="does not take these messages: "):
        rendered(on_demand, name)
    assert rendered(on_demand, "none") == "fine"


@pytest.mark.parametrize("name", ["endless", "power"])
def test_a_template_without_end_is_ended_and_the_next_text_is_rendered(on_demand: ChatTemplate, name: str) -> None:
    assert rendered(on_demand, "none") == "fine"
    with pytest.raises(InputError, match=r"these messages: it takes over 2 s\."):
        rendered(on_demand, name)
    assert rendered(on_demand, "none") == "fine"
    assert len([p for p in children() if p.cpu_times().user > 1.5]) == 0, "the endless one is gone"


@pytest.mark.parametrize(("name", "sentence"), [("encode", "unknown encoding: nonsense"), ("deep", "recursion")])
def test_whatever_a_template_raises_is_a_sentence(on_demand: ChatTemplate, name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        rendered(on_demand, name)
    assert rendered(on_demand, "none") == "fine"


def test_memory_stays_with_the_process_that_the_template_has(on_demand: ChatTemplate) -> None:
    before = psutil.Process().memory_info().rss
    for name in ("+", "lists", "ljust"):
        with pytest.raises(InputError):
            rendered(on_demand, name)
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_a_template_is_compiled_once_by_one_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    before = children()
    assert [rendered(template, str(i)) for i in range(50)] == [str(i) for i in range(50)]
    (process,) = [p for p in children() if p not in before]
    assert "torch" not in "".join(m.path for m in process.memory_maps())
    template.close()
    assert not process.is_running()


def test_threads_that_share_a_template_get_their_own_texts() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: rendered(template, str(i) * 1000), range(100)))
    assert texts == [str(i) * 1000 for i in range(100)]
    template.close()


def test_a_process_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    before = children()
    assert rendered(template, "a") == "a"
    (process,) = [p for p in children() if p not in before]
    process.kill()
    process.wait()
    with pytest.raises(InputError, match="its process ended"):
        rendered(template, "b")
    assert rendered(template, "c") == "c"
    template.close()


def test_lone_surrogates_pass_and_a_broken_template_is_tried_once() -> None:
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": "a\ud800"}]) == "a\ud800"
    template = ChatTemplate("{% if %}")
    before = children()
    for _ in range(2):
        with pytest.raises(InputError, match="chat template cannot be used"):
            rendered(template, "x")
    assert children() == before


PARENT = """
import signal, sys
from twostroke.data.chat import ChatTemplate
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored
template = ChatTemplate("{% if messages[0].content == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}")
template.render([{"content": ""}])
print(template._process._popen.pid, flush=True)
if sys.argv[1] == "endless":
    template.render([{"content": "endless"}])
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "endless"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_the_one_that_asks(state: str, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)  # until it waits or works: Python misses a signal that comes just before a read, until that ends
        parent.send_signal(number)
        assert parent.wait(10) != 0
    # At once where it waits for work; by its alarm, 2 s after it began, where it is at work.
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(10)
    assert not child.is_running()


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__init__}'.format_map({'a': ''}) }}",
    "{{ '{0.__class__}' | format('') | format }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ url_for.__globals__ }}",
    "{{ messages.__iter__.__self__ }}",
    "{% import 'os' as os %}",
    "{% from '/etc/passwd' import x %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [messages]|map('attr', 'append')|first()(1) }}",
    "{% for k in ({}).items.__self__ %}{{ k }}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_holds(template: str) -> None:
    """Refused, or what was reached for is undefined, which has no text."""
    try:
        text = compile_template(template)({"messages": MESSAGES})
    except (jinja2.TemplateError, TypeError):
        pass
    else:
        assert text.strip("[]") in ("", "Undefined", "Undefined, Undefined, Undefined")
