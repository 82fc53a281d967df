"""Looks at pages in a real browser, and tells what it saw: a program of its own, since a browser
that falls takes its process with it.

    python tests/browser.py '{"width": 800, "dark": false, "pages": {"a.html": "a.png"}}'

prints "started", and then one line of JSON: for each page its title, its headings, its text,
every address that was asked for, the images that did not load, and the widths of window and page.
"""

import json
import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # it may be run by root
WANTED = json.loads(sys.argv[1])
DARK = " --blink-settings=preferredColorScheme=0" if WANTED["dark"] else ""
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu" + DARK

from PyQt6.QtCore import QEventLoop, QTimer, QUrl  # noqa: E402 - the environment comes first
from PyQt6.QtWebEngineCore import (  # noqa: E402
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

LOOK = """JSON.stringify({
    title: document.title,
    headings: [...document.querySelectorAll("h1, h2, h3")].map(h => [h.tagName, h.innerText]),
    text: document.body.innerText,
    images: document.images.length,
    broken: [...document.images].filter(i => !i.naturalWidth || !i.alt).map(i => i.alt || "no alt"),
    window_width: document.documentElement.clientWidth,
    page_width: document.documentElement.scrollWidth,
    page_height: document.documentElement.scrollHeight,
    background: getComputedStyle(document.body).backgroundColor,
})"""


class Listener(QWebEngineUrlRequestInterceptor):
    """Writes down every address that is asked for; what is not on this machine stays unasked."""

    def __init__(self):
        """Has heard nothing yet."""
        super().__init__()
        self.heard = []

    def interceptRequest(self, info):  # noqa: N802 - Qt's name
        """Called by the browser."""
        self.heard.append(info.requestUrl().toString()[:200])
        info.block(info.requestUrl().scheme() not in ("file", "about"))


def wait(begin, seconds=20):
    """Runs the browser until what `begin` was given is called; returns what it is called with."""
    loop, answers = QEventLoop(), []
    begin(lambda *answer: (answers.append(answer), loop.quit()))
    QTimer.singleShot(seconds * 1000, loop.quit)
    if not answers:
        loop.exec()
    if not answers:
        sys.exit("the browser did not answer")
    return answers[0][0] if answers[0] else None


def rest(seconds):
    """Lets the browser go on for a while."""
    wait(lambda done: QTimer.singleShot(int(seconds * 1000), done))


def load(view, url):
    """Loads a page, and waits until it and its images have come, or failed to."""
    once = []

    def begin(done):
        once.append(view.loadFinished.connect(done))
        view.load(QUrl(url))

    if not wait(begin):
        sys.exit(f"{url} was not loaded")
    view.loadFinished.disconnect(once[0])


def look(view, listener, path, picture):
    """Returns what a page shows, and takes a picture of all of it."""
    listener.heard.clear()
    view.resize(WANTED["width"], 900)
    load(view, f"file://{path}")
    rest(0.2)
    seen = json.loads(wait(lambda done: view.page().runJavaScript(LOOK, done)))
    seen["asked_for"] = list(listener.heard)
    if picture:
        view.resize(WANTED["width"], seen["page_height"])
        rest(2)  # until all of it is painted
        view.grab().save(picture)
    return seen


def main():
    """Looks at every page."""
    application = QApplication(sys.argv[:1])
    listener = Listener()
    profile = QWebEngineProfile.defaultProfile()
    profile.setUrlRequestInterceptor(listener)
    view = QWebEngineView()
    attributes = QWebEngineSettings.WebAttribute
    view.settings().setAttribute(attributes.ShowScrollBars, False)
    # Or a page on this machine could not ask for others, and none would be heard.
    view.settings().setAttribute(attributes.LocalContentCanAccessRemoteUrls, True)
    view.show()
    load(view, "about:blank")
    print("started", flush=True)  # noqa: T201 - a program
    seen = {path: look(view, listener, path, picture) for path, picture in WANTED["pages"].items()}
    print(json.dumps(seen), flush=True)  # noqa: T201
    view.close()
    application.quit()


main()
