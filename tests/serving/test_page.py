# SPDX-License-Identifier: Apache-2.0
"""The page at / in headless Chromium: it streams, stops, copies, and asks for the key; no other file is needed."""

import re

import httpx2
import pytest

from tests.browser import Browser, executable
from tests.serving.conftest import SECRET

pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")

ENDED = "!document.querySelector('.busy') && document.querySelector('.turn.assistant')"
PNG_SIZE = slice(16, 24)  # width and height in the header


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser for all tests; they are skipped where there is none."""
    executable()
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def submit(browser, text: str, **fields) -> None:
    """Fill in the form of the page and send it."""
    for name, value in fields.items():
        browser.value(f"void (document.querySelector('#{name}').value = {value!r})")
    browser.fill("#input", text)
    browser.value("document.querySelector('#send').click()")


def open_texts(browser, url: str) -> None:
    """Open the page of a model that chats at the tab that continues texts."""
    browser.open(url)
    browser.wait("!document.querySelector('#panel').hidden")
    browser.value("document.querySelector('#tab-text').click()")


def last_answer(browser) -> str:
    return browser.value("[...document.querySelectorAll('.turn.assistant .text')].at(-1).textContent")


def test_nothing_comes_from_elsewhere(chatting):
    answer = httpx2.get(chatting.url)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", answer.text)


def test_a_chat_goes_on_and_its_answers_are_the_servers(browser, chatting):
    browser.open(chatting.url)
    browser.wait("!document.querySelector('#panel').hidden")
    messages = []
    for text in ("what is 2 + 3?", "and \u00e9?"):
        submit(browser, text, temperature="0", max_tokens="6")
        browser.wait(ENDED)
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "temperature": 0, "max_tokens": 6}
        answer = httpx2.post(f"{chatting.url}/v1/chat/completions", json=body).raise_for_status().json()
        messages.append({"role": "assistant", "content": last_answer(browser)})
        assert answer["choices"][0]["message"]["content"] == messages[-1]["content"]
    assert browser.value("document.querySelectorAll('.turn').length") == 4 and not browser.errors


def test_an_answer_can_be_stopped_copied_and_its_error_is_shown(browser, chatting):
    open_texts(browser, chatting.url)
    submit(browser, "7 is", temperature="0", max_tokens="12")
    browser.wait(f"{ENDED} && document.querySelector('#count').textContent")
    body = {"prompt": "7 is", "temperature": 0, "max_tokens": 12}
    expected = httpx2.post(f"{chatting.url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert last_answer(browser) == f"7 is{expected}"
    browser.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.value("document.querySelector('.turn button').click()")
    browser.wait("window.copied")
    assert browser.value("window.copied") == f"7 is{expected}"
    browser.value("void (window.fetch = new Proxy(fetch, { apply: async (call, self, given) => {"
                  " const answer = await Reflect.apply(call, self, given);"
                  " if (answer.ok) document.querySelector('#stop').click(); return answer; } }))")  # fmt: skip
    submit(browser, "1 is", max_tokens="80")
    browser.wait("[...document.querySelectorAll('.note')].at(-1).textContent === 'stopped'")
    submit(browser, "1 is", max_tokens="100")
    browser.wait("!document.querySelector('#error').hidden")
    assert "more than the 96 tokens" in browser.value("document.querySelector('#error').textContent")
    assert browser.value("document.querySelectorAll('.turn').length") == 2
    assert browser.errors.pop() == "Failed to load resource: the server responded with a status of 400 (Bad Request)"


def test_a_continuation_fits_behind_its_prompt_if_no_number_is_typed(browser, chatting):
    """The model has 96 tokens, fewer than a continuation has elsewhere."""
    open_texts(browser, chatting.url)
    submit(browser, "7 is 7 times 1;", temperature="0", max_tokens="")
    browser.wait(f"{ENDED} && document.querySelector('#count').textContent")
    assert last_answer(browser).startswith("7 is 7 times 1;")
    assert browser.value("document.querySelector('#error').hidden")
    browser.errors.clear()  # of the answer that says how many tokens fit


def test_the_key_is_asked_for(browser, completing):
    browser.open(completing.url)
    browser.wait("!document.querySelector('#key').hidden")
    for key, shown in (("wrong", "document.querySelector('#about').textContent.startsWith('the key is wrong')"),
                       (SECRET, "!document.querySelector('#panel').hidden")):  # fmt: skip
        browser.fill("#secret", key)
        browser.value("document.querySelector('#key button').click()")
        browser.wait(shown)
    assert browser.value("document.querySelector('#tabs').hidden")  # it does not chat
    assert browser.value("document.querySelector('#key').hidden")
    browser.errors.clear()


def test_an_error_in_the_middle_of_an_answer_is_shown(browser, chatting):
    browser.open(chatting.url)
    browser.wait("!document.querySelector('#panel').hidden")
    events = r'data: {"choices": [{"text": "one"}]}\n\ndata: {"error": {"message": "the model failed"}}\n\n'
    browser.value(f"void (window.fetch = async () => new Response('{events}'))")
    submit(browser, "7 is")
    browser.wait("!document.querySelector('#error').hidden")
    assert browser.value("document.querySelector('#error').textContent") == "the model failed"


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (390, True)])
def test_it_fits_in_a_wide_and_in_a_narrow_window(browser, chatting, tmp_path, width, dark):
    browser.open(chatting.url, width=width, dark=dark)
    browser.wait("!document.querySelector('#panel').hidden")
    browser.value("void (document.querySelector('#controls').open = true)")
    submit(browser, "m" * 50, max_tokens="9")
    browser.wait(ENDED)
    assert browser.value("document.documentElement.scrollWidth === document.documentElement.clientWidth")
    picture = browser.screenshot(tmp_path / "page.png")
    assert int.from_bytes(picture[PNG_SIZE][:4], "big") == width and len(picture) > 10_000
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(22, 25, 30)" if dark else "rgb(255, 255, 255)")
