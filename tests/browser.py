"""Loads pages in a real browser and reports what it shows.

This is a separate program, because a browser that crashes ends its process.

    python tests/browser.py '{"width": 800, "dark": false, "pages": {"a.html": "a.png"}}'

prints "started" and then one line of JSON with the following for each page: title, headings, text,
requested addresses, number of images, images that did not load or have no description, widths of
window and page, height of the page, background color, and what could run code or has run: see
`ACTIVE`. A screenshot of a page is saved to the file after the colon, unless that is "".
"""

import json
import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # the sandbox refuses to run as root
WANTED = json.loads(sys.argv[1])
DARK = " --blink-settings=preferredColorScheme=0" if WANTED["dark"] else ""
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu" + DARK

from PyQt6.QtCore import QEventLoop, QTimer, QUrl  # noqa: E402 - Qt reads the environment on import
from PyQt6.QtWebEngineCore import (  # noqa: E402
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

INSPECT = """JSON.stringify({
    title: document.title,
    headings: [...document.querySelectorAll("h1, h2, h3")].map(h => [h.tagName, h.innerText]),
    text: document.body.innerText,
    images: document.images.length,
    broken: [...document.images].filter(i => !i.naturalWidth || !i.alt).map(i => i.alt || "no alt"),
    window_width: document.documentElement.clientWidth,
    page_width: document.documentElement.scrollWidth,
    page_height: document.documentElement.scrollHeight,
    background: getComputedStyle(document.body).backgroundColor,
    owned: String(window.owned),
    active: ACTIVE,
})"""
# Elements and attributes that run or fetch something: a report has none of them.
ACTIVE = """[...document.querySelectorAll("*")].flatMap(element => [
    ..."script iframe frame object embed applet link base form input svg math audio video source template"
        .split(" ").filter(name => name === element.localName),
    ...[...element.attributes].filter(attribute =>
        attribute.name.startsWith("on")
        || attribute.name === "srcdoc"
        || (attribute.name === "http-equiv" && attribute.value !== "Content-Security-Policy")
        || (["src", "href"].includes(attribute.name) && !/^(#|data:image)/.test(attribute.value))
    ).map(attribute => `${element.localName} ${attribute.name}`),
])"""
INSPECT = INSPECT.replace("ACTIVE", ACTIVE)


class RequestRecorder(QWebEngineUrlRequestInterceptor):
    """Records every requested address, and blocks all that are not local files."""

    def __init__(self):
        """Starts without any addresses."""
        super().__init__()
        self.addresses = []

    def interceptRequest(self, info):  # noqa: N802 - Qt's name
        """Called by the browser before each request."""
        self.addresses.append(info.requestUrl().toString()[:200])
        info.block(info.requestUrl().scheme() not in ("file", "about"))


def wait(begin, seconds=20):
    """Runs the browser until it calls back.

    Args:
        begin: starts an operation. Called with the callback to pass to the browser.
        seconds: the program ends with an error if the callback has not been called by then.

    Returns:
        The first argument of the callback, or None.
    """
    loop, answers = QEventLoop(), []
    begin(lambda *answer: (answers.append(answer), loop.quit()))
    QTimer.singleShot(seconds * 1000, loop.quit)
    if not answers:
        loop.exec()
    if not answers:
        sys.exit("the browser did not call back in time")
    return answers[0][0] if answers[0] else None


def pause(seconds):
    """Runs the browser for some seconds."""
    wait(lambda done: QTimer.singleShot(int(seconds * 1000), done))


def load(view, url):
    """Loads a page, and waits until its images have loaded or failed to load.

    It is loaded as if in a new tab: a page before it may be on its way elsewhere by itself, and then
    the browser would take the end of that way for the end of this.
    """
    page = QWebEnginePage(QWebEngineProfile.defaultProfile(), view)
    view.setPage(page)

    def begin(done):
        page.loadFinished.connect(done)
        page.load(QUrl(url))

    if not wait(begin):
        sys.exit(f"{url} could not be loaded")


def ask(view, times=20):
    """Returns what `INSPECT` says of the page. One that is leaving for another answers with None."""
    for _ in range(times):
        answer = wait(lambda done: view.page().runJavaScript(INSPECT, done))
        if answer is not None:
            return answer
        pause(0.05)
    sys.exit(f"{view.url().toString()} does not answer")


def inspect(view, recorder, path, screenshot):
    """Returns what a page shows. Saves a screenshot of the whole page unless `screenshot` is ""."""
    recorder.addresses.clear()
    view.resize(WANTED["width"], 900)
    load(view, f"file://{path}")
    pause(WANTED.get("pause", 0.2))
    shown = json.loads(ask(view))
    shown["requested"] = list(recorder.addresses)
    if screenshot:
        view.resize(WANTED["width"], shown["page_height"])
        pause(2)  # until the whole page is painted
        view.grab().save(screenshot)
    return shown


def main():
    """Inspects all pages."""
    application = QApplication(sys.argv[:1])
    recorder = RequestRecorder()
    profile = QWebEngineProfile.defaultProfile()
    profile.setUrlRequestInterceptor(recorder)
    view = QWebEngineView()
    attributes = QWebEngineSettings.WebAttribute
    profile.settings().setAttribute(attributes.ShowScrollBars, False)
    # Otherwise Qt refuses remote requests of local pages before they can be recorded.
    profile.settings().setAttribute(attributes.LocalContentCanAccessRemoteUrls, True)
    view.show()
    load(view, "about:blank")
    print("started", flush=True)  # noqa: T201 - the result of a program
    shown = {
        path: inspect(view, recorder, path, screenshot)
        for path, screenshot in WANTED["pages"].items()
    }
    print(json.dumps(shown), flush=True)  # noqa: T201
    view.close()
    application.quit()


main()
