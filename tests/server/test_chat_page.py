"""The page at ``/``: how its files are sent, and what Chromium makes of it in front of the scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, until

from browser import CONTRAST, FAULTS, SIZES, browser, pictures, shown
from twostroke.server.metrics import Metrics
from twostroke.server.page import PAGE_ROUTES

__all__ = ["browser", "pictures"]

HOSTILE = '</p><script>document.title="taken"</script><img src=x onerror=document.title="taken">'
CODE = f"Text with `a < b`.\n\n```python\nprint('{HOSTILE}')\n```\n\nAnd é日🙂 after."
REFUSED = "the server responded with a status of"
"""Of the line that Chromium itself writes to the console about a request that was refused."""

UNNAMED = """() => [...document.querySelectorAll('input, select, textarea, button')]
    .filter(e => !(e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent).trim()).map(e => e.outerHTML)"""


@pytest.fixture(scope="module")
def adapted(echo: Served, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The echo server with an adapter, whose answers are a hundred tokens further on."""
    asked = {"lora_name": "shifted", "lora_path": str(tmp_path_factory.mktemp("adapter"))}
    assert httpx.post(f"{echo.url}/v1/load_lora_adapter", json=asked, trust_env=False).status_code == 200
    return echo


@pytest.fixture(scope="module")
def tab(browser: Any, adapted: Served) -> Iterator[Any]:
    with shown(browser, adapted.url, *SIZES[0]) as page:
        yield page


@pytest.fixture
def page(tab: Any, adapted: Served) -> Any:
    tab.unroute_all()
    tab.goto(adapted.url)
    tab.locator("#status.ready").wait_for()
    return tab


def ask(page: Any, text: str, **fields: object) -> None:
    for name, value in fields.items():
        page.locator(f"[data-field={name}]").fill(str(value))
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def open_panels(page: Any) -> None:
    for summary in page.locator("summary").all():
        if not summary.evaluate("node => node.parentElement.open"):
            summary.click()


def answers(page: Any, n: int) -> list[str]:
    """Texts of the ``n`` answers, once they have ended."""
    # Not wait_for_function, which evaluates text in the page: its policy forbids that.
    until(lambda: page.locator(".answer").count() == n and page.locator(".answer.busy").count() == 0)
    return page.locator(".answer .text").all_inner_texts()


def expected(served: Served, messages: list[dict[str, str]], model: str = "echo", max_tokens: int = 20) -> str:
    body = {"model": model, "messages": messages, "max_tokens": max_tokens}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, trust_env=False).json()
    return str(answer["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def streamed(page: Any, pieces: list[str], end: str | None = "stop", rest: str = "data: [DONE]\n\n") -> None:
    """From now on chats are answered with ``pieces``, each of which is a token."""
    events = []
    for i, piece in enumerate(pieces):
        token = {"token": piece, "bytes": list(piece.encode()), "logprob": -0.1 - i, "top_logprobs": []}
        choice = {"index": 0, "delta": {"content": piece}, "logprobs": {"content": [token]}, "finish_reason": None}
        events.append({"choices": [choice]})
    events.append({"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": end}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + rest
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))


# How the files are sent.


def test_files_have_their_types_and_are_sent_once(echo: Served) -> None:
    kinds = {"/": "text/html", "css": "text/css", ".js": "text/javascript"}
    assert len(PAGE_ROUTES) >= 5
    with httpx.Client(base_url=echo.url, trust_env=False) as web:
        for path in PAGE_ROUTES:
            found = web.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"] == f"{kinds[path[-3:]]}; charset=utf-8"
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]
            assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", found.text)  # nothing comes from the network
            tag = found.headers["etag"]
            for given in (tag, f'"other", W/{tag}', "*"):
                again = web.get(path, headers={"if-none-match": given})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert web.get(path, headers={"if-none-match": '"other"'}).status_code == 200
            assert web.head(path).headers["content-length"] == str(len(found.content))
            assert web.post(path).status_code == 405
        assert web.get("/page/chat.py").status_code == 404
        assert web.get("/", headers={"host": "evil.example"}).status_code == 403


def test_predicted_latencies_are_shown_with_their_shape() -> None:
    metrics = Metrics()
    assert b"twostroke_predicted_seconds{" not in metrics.render({})
    metrics.predict({"ttft": 0.25, "tpot": 0.01}, 512, 128)
    lines = metrics.render({}).decode().splitlines()
    assert 'twostroke_predicted_seconds{latency="ttft",output_tokens="128",prompt_tokens="512"} 0.25' in lines


# In the browser.


def test_a_message_is_answered_and_its_tokens_are_shown(page: Any, adapted: Served) -> None:
    ask(page, "the fox", max_tokens=20)
    (text,) = answers(page, 1)
    assert text == expected(adapted, [user("the fox")])
    assert page.locator(".asked p").inner_text() == "the fox"
    assert re.search(r"20 tokens · first after .* · .* each next · cut", page.locator(".foot").inner_text())
    assert page.locator("#text").input_value() == ""
    assert page.evaluate("document.activeElement.id") == "text"
    spans = page.locator(".t")
    assert "".join(spans.all_inner_texts()) == text
    spans.nth(2).hover()
    assert page.locator("#tip").inner_text().startswith(f"{text[2]} had 60.7%, ln p = −0.500")
    assert page.locator("#tip tr").count() == 5
    page.locator(".answer .text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith(f"{text[3]} had")  # on from the token under the pointer
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_what_was_said_and_what_was_set_is_sent(page: Any) -> None:
    page.locator("#system").fill("Be brief.")
    ask(page, "one", max_tokens=3, temperature=0.5, seed=7, stop="xyz")
    (first,) = answers(page, 1)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#text").fill("two")
        page.locator("#text").press("Shift+Enter")
        page.keyboard.type("lines")
        page.keyboard.press("Enter")
    answers(page, 2)
    body = sent.value.post_data_json
    said = [{"role": "assistant", "content": first}, user("two\nlines")]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, user("one"), *said]
    given = {"temperature": 0.5, "seed": 7, "stop": "xyz", "max_tokens": 3, "model": "echo", "logprobs": True}
    assert given.items() <= body.items()
    assert "top_p" not in body  # what is not set is left to the server


def test_a_touch_shows_a_token(browser: Any, adapted: Served) -> None:
    with shown(browser, adapted.url, *SIZES[1], touch=True) as page:
        page.locator("#status.ready").wait_for()
        open_panels(page)
        ask(page, "the fox", max_tokens=20)
        (text,) = answers(page, 1)
        page.locator(".t").nth(2).tap()
        assert page.locator("#tip").is_visible()
        assert page.locator("#tip").inner_text().startswith(f"{text[2]} had 60.7%")
        page.locator(".asked").tap()
        assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_is_shown_behind_the_composer(browser: Any, adapted: Served, width: int, height: int) -> None:
    """It covers the window's end: the answer that is written and whatever has the focus lie above it."""
    with shown(browser, adapted.url, width, height) as page:
        page.locator("#status.ready").wait_for()
        open_panels(page)
        top = page.locator("#composer").evaluate("node => node.getBoundingClientRect().top")
        ask(page, "short", max_tokens=5)
        answers(page, 1)
        if width > 860:  # a phone has its panels above
            assert page.evaluate("scrollY") == 0  # a conversation that fits does not move the page
        streamed(page, ["paragraph\n\n"] * 30)
        ask(page, "long")
        answers(page, 2)
        ask(page, "last")
        answers(page, 3)
        bottom = page.locator(".foot").last.evaluate("node => node.getBoundingClientRect().bottom")
        assert bottom <= top
        page.evaluate("scrollTo(0, 0)")
        page.locator(".asked button").first.focus()
        for _ in range(8):
            page.keyboard.press("Tab")
            bottom = page.evaluate("document.activeElement.getBoundingClientRect().bottom")
            is_answer = page.evaluate(
                "document.activeElement.matches('.text, #composer *')"
            )  # an answer may be higher than the window
            assert is_answer or bottom <= top


def test_a_model_that_has_to_be_loaded_says_so(browser: Any, adapted: Served) -> None:
    with shown(browser, "about:blank", *SIZES[0]) as page:
        model = {"id": "echo", "max_model_len": 4096, "chat_template": True, "state": "unloaded"}
        page.route("**/v1/models", lambda route: route.fulfill(body=json.dumps({"data": [model]})))
        held: list[Any] = []
        page.route("**/v1/chat/completions", lambda route: held.append(route))
        page.goto(adapted.url)
        page.locator("#status.ready").wait_for()
        ask(page, "the fox", max_tokens=5)
        page.locator(".foot", has_text="The model is loaded first.").wait_for()
        page.screenshot()  # lets the held route arrive
        held[0].continue_()
        answers(page, 1)
        assert "loaded first" not in page.locator(".foot").inner_text()


def test_an_answer_is_stopped_and_the_server_hears_of_it(page: Any, adapted: Served) -> None:
    ask(page, "at length")
    page.locator(".answer .t").nth(5).wait_for()
    assert page.locator("#send").is_disabled()
    page.keyboard.press("Escape")
    (text,) = answers(page, 1)
    assert text
    assert "stopped" in page.locator(".foot").inner_text()
    until(lambda: "\ntwostroke_requests_running 0.0\n" in httpx.get(f"{adapted.url}/metrics", trust_env=False).text)
    ask(page, "again", max_tokens=2)
    assert answers(page, 2)[0] == text


def test_a_message_is_regenerated_and_edited_and_all_is_cleared(page: Any, adapted: Served) -> None:
    ask(page, "one", max_tokens=4)
    answers(page, 1)
    ask(page, "two", temperature=0)
    answers(page, 2)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".regenerate").nth(1).click()
    assert sent.value.post_data_json["messages"][-1] == user("two")
    answers(page, 2)
    page.locator(".edit").first.click()
    page.locator(".asked textarea").fill("uno")
    page.locator(".asked textarea").press("Escape")
    assert page.locator(".asked p").all_inner_texts() == ["one", "two"]
    page.locator(".edit").first.click()
    page.locator(".asked textarea").fill("uno")
    page.locator(".asked textarea").press("Enter")
    assert answers(page, 1) == [expected(adapted, [user("uno")], max_tokens=4)]  # what followed is gone
    assert page.locator(".asked p").all_inner_texts() == ["uno"]
    page.locator("#clear").click()
    assert page.locator(".turn").count() == 0
    assert page.locator("#empty").is_visible()


def test_two_models_answer_one_message_and_keep_their_own_history(page: Any, adapted: Served) -> None:
    page.locator("#beside").select_option("shifted")
    ask(page, "the fox", max_tokens=20)
    found = answers(page, 2)
    assert found == [expected(adapted, [user("the fox")], model) for model in ("echo", "shifted")]
    boxes = [node.bounding_box() for node in page.locator(".answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "chat/comp" in request.url else None)
    ask(page, "more")
    answers(page, 4)
    assert {body["model"]: body["messages"][1]["content"] for body in bodies} == dict(
        zip(("echo", "shifted"), found, strict=True)
    )


def test_a_models_text_is_text(page: Any) -> None:
    pieces = re.findall(r"\s?\S+|\s", CODE)
    streamed(page, [*pieces[:-1], *pieces[-1]])
    ask(page, HOSTILE)
    answers(page, 1)
    assert page.title() == "Twostroke"
    assert page.locator("main img, main script").count() == 0
    assert page.locator(".asked p").inner_text() == HOSTILE
    assert page.locator(".code pre").inner_text() == f"print('{HOSTILE}')"
    assert page.locator(".code .row span").inner_text() == "python"
    assert page.locator(".text p").all_inner_texts() == ["Text with a < b.", "And é日🙂 after."]
    assert page.locator(".text p code").inner_text() == "a < b"
    page.locator(".t", has_text="é日🙂").hover()
    assert page.locator("#tip").inner_text().startswith("␣é日🙂 had")


def test_tokens_find_their_place_in_the_text(page: Any) -> None:
    """Halves of characters, a special token without text, and a first space that the text has not."""
    placed = page.evaluate(
        """async () => {
            const { Tokens, blocks } = await import('/page/answer.js');
            const tokens = new Tokens(), entry = bytes => ({ token: '?', bytes, logprob: -1, top_logprobs: [] });
            const utf8 = text => [...new TextEncoder().encode(text)], smile = utf8('🙂');
            const list = [utf8(' Hi'), smile.slice(0, 2), smile.slice(2), utf8('<|end|>'), utf8('!')];
            tokens.add({ logprobs: { content: list.map(entry) } });
            tokens.place('Hi', false);
            const early = tokens.placed;
            tokens.place('Hi🙂!', true);
            const cut = blocks('```js\\nlet a');  // a fence that is still open
            return [early, tokens.list.map(t => [t.start, t.end]), cut.map(b => [b.kind, b.start, b.end])];
        }"""
    )
    assert placed == [2, [[0, 2], [2, 2], [2, 4], [4, 4], [4, 5]], [["code", 6, 11]]]


def test_failures_are_sentences(browser: Any, adapted: Served) -> None:
    with shown(browser, adapted.url, *SIZES[0], expected="Failed to load resource") as page:
        page.locator("#status.ready").wait_for()
        ask(page, " ")
        assert page.locator("#composer-error").inner_text() == "The message is empty."
        ask(page, "hot", temperature=5)
        answers(page, 1)
        assert page.locator(".answer .error").inner_text() == "Temperature must be at most 2."
        page.locator("[data-field=temperature]").fill("")
        for end, sentence in (
            ('data: {"error": {"message": "the engine was lost."}}\n\n', "The engine was lost."),
            ("", "The server ended in the middle of this answer."),
        ):
            streamed(page, ["half "], None, end)
            page.locator(".regenerate").last.click()
            answers(page, 1)
            assert page.locator(".answer .error").inner_text() == sentence
            assert page.locator(".answer .text").inner_text().strip() == "half"
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.locator(".regenerate").last.click()
        answers(page, 1)
        assert page.locator(".answer .error").inner_text().startswith("The server cannot be reached.")
        refusal = {"error": {"message": "1 requests are queued or running; at most 1 may be. Try again later."}}
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=429, headers={"retry-after": "3"}, body=json.dumps(refusal)),
        )
        page.locator(".regenerate").last.click()
        answers(page, 1)
        assert page.locator(".answer .error").inner_text().endswith("Try again later. A place may be free in 3 s.")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "next")
        assert sent.value.post_data_json["messages"] == [user("next")]  # a turn without an answer is not sent


def test_figures_stand_beside_what_was_predicted(browser: Any, adapted: Served, pictures: Path) -> None:
    metrics = Metrics()
    metrics.predict({"ttft": 0.0312, "tpot": 0.0045}, 512, 128)
    metrics.observe(0.0, 0.04, 1.04, 101)
    metrics.ready.set(1)
    tokens = iter(range(0, 10**6, 100))
    engine = {"running": 2, "waiting": 1, "pages_used": 250, "pages_total": 1000, "pages_cached": 30}
    with shown(browser, adapted.url, *SIZES[0]) as page:
        page.route(
            "**/metrics", lambda route: route.fulfill(body=metrics.render(engine | {"output_tokens": next(tokens)}).decode())
        )
        for _ in range(2):  # at once, where the page looks every two seconds
            with page.expect_response("**/metrics"):
                page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.locator("dd", has_text="31.2 ms predicted").wait_for()
        page.locator("#speed svg").wait_for()
        figures = page.locator("#figures").inner_text()
        assert re.search(r"first token\s+40 ms\s+31.2 ms predicted\s+each next one\s+10 ms\s+4.5 ms predicted", figures)
        assert re.search(r"running\s+2\s.*waiting\s+1\s.*KV cache\s+25%\s+30 pages", figures, re.DOTALL)
        assert "one request at a time of 512 + 128 tokens" in page.locator("#figures-note").inner_text()
        page.screenshot(path=pictures / "chat-figures.png")
    with shown(browser, adapted.url, *SIZES[0], expected="Failed to load resource") as page:
        page.locator("#status.ready").wait_for()
        page.route("**/metrics", lambda route: route.abort())
        page.locator("#status", has_text="not connected").wait_for()
        assert "These figures are the last that came." in page.locator("#figures-note").inner_text()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any, adapted: Served, pictures: Path) -> None:
    def guarded(route: Any) -> None:
        refused = {"status": 401, "body": json.dumps({"error": {"message": "a valid API key is needed."}})}
        known = route.request.headers.get("authorization") == "Bearer sesame"
        route.continue_() if known else route.fulfill(**refused)

    with shown(browser, f"{adapted.url}/health", *SIZES[0], expected=REFUSED) as page:
        for path in ("v1/**", "metrics"):
            page.route(f"**/{path}", guarded)
        page.goto(adapted.url)
        page.locator("#key-form").wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.locator("#server").inner_text().split("\n")[-1] == "The server shows its figures to those who have a key."
        for key, sentence in (("no key", "has printable ASCII characters and no space"), ("guess", "does not accept this key")):
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
            page.locator("#key-error", has_text=sentence).wait_for()
        page.screenshot(path=pictures / "chat-key.png")
        page.locator("#key").fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#status.ready").wait_for()
        ask(page, "the fox", max_tokens=3)
        answers(page, 1)
        page.reload()
        page.locator("#status.ready").wait_for()
        page.locator("#forget-key").click()
        page.locator("#key-form").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_model_without_a_chat_template_continues_text(browser: Any, adapted: Served, pictures: Path) -> None:
    with shown(browser, "about:blank", *SIZES[0]) as page:
        model = {"id": "echo", "max_model_len": 4096, "chat_template": False}
        page.route("**/v1/models", lambda route: route.fulfill(body=json.dumps({"data": [model]})))
        page.goto(adapted.url)
        page.locator("#empty", has_text="without a chat template").wait_for()
        assert page.locator("#send").inner_text() == "Continue"
        assert page.locator("#system").is_hidden()
        assert page.locator("[data-field=max_tokens]").input_value() == "128"
        ask(page, "D", max_tokens=6)
        (text,) = answers(page, 1)
        assert text == "EFGHIJ"
        assert "".join(page.locator(".t").all_inner_texts()) == text
        page.get_by_role("button", name="Put into the text").click()
        assert page.locator("#text").input_value() == "DEFGHIJ"
        page.screenshot(path=pictures / "chat-completion.png")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_of_the_page_is_cut_off(browser: Any, pictures: Path, adapted: Served, width: int, height: int) -> None:
    with shown(browser, adapted.url, width, height) as page:
        page.locator("#status.ready").wait_for()
        page.screenshot(path=pictures / f"chat-{width}-empty.png", full_page=True)
        assert page.evaluate(FAULTS) == []
        open_panels(page)
        page.locator("#shade").check()
        page.locator("#beside").select_option("shifted")
        ask(page, "Which of the two is " + "long" * 40 + "?", max_tokens=60)
        answers(page, 2)
        streamed(page, re.findall(r"\s?\S+|\s", CODE * 2))
        ask(page, "And in Python?")
        answers(page, 4)
        page.locator(".t").nth(-3).hover()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            picture = pictures / f"chat-{width}-{scheme}.png"
            page.screenshot(path=picture, full_page=True)
            print(f"screenshot: {picture}")
            assert page.evaluate(CONTRAST) == []
        assert page.evaluate(FAULTS) == []
        assert page.evaluate(UNNAMED) == []
