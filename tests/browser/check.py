"""Shows the status page to a real browser: problems, order, filter, refresh, the page of a tube, the
page without script, in the dark and on a phone. No step may print a message in the console. What the pages say is
compared with `stats` in tests/status_page.

Use: check.py SERVER"""
import contextlib
import re
import sys
import time

from browser import Browser
from server import Server, wait_until

ODD_TUBE = "a/b;c.d$e_f(g)+-"
TABLE = """
const texts = cells => [...cells].map(cell => cell.textContent.trim());
const heads = texts(document.querySelectorAll("#tubes thead th"));
const rows = [...document.querySelectorAll("#tubes tbody tr")].map(row => texts(row.cells));
return rows.map(row => [row[0].split(' ')[0], Object.fromEntries(row.map((text, n) => [heads[n], text]))]);
"""
JOBS = 'return [...document.querySelectorAll("#jobs tbody tr")].map(row => row.textContent)'


def expect(what, found, expected=True):
    assert found == expected, f"{what}: {found!r} instead of {expected!r}"


def table(browser):
    """The rows of the table, by the names of tubes and columns, in their order."""
    return dict(browser.run(TABLE))


def expect_tubes(browser, *tubes):
    wait_until(f"the tubes are {tubes}", lambda: list(table(browser)) == list(tubes))


def fill(client):
    """Jobs in each state, in tubes with all characters that names can have."""
    for tube, count, job in [("mail", 3, {}), ("mail", 2, {"pri": 5000, "delay": 500}),
                             (ODD_TUBE, 12, {"body": b"secret"}), ("thumbnails", 1234, {"ttr": 9000})]:
        for _ in range(count):
            client.put(**{"body": b"x", "tube": tube, **job})
    client.ask("watch mail")
    client.must("BURIED", f"bury {client.ask('reserve')[1]} 7")
    client.must("RESERVED", "reserve")


def check_problems(page, browser, client):
    browser.get(page)
    # One click selects the line that helps, and the page leaves it selected.
    browser.click("code")
    line = browser.run("return getSelection().toString()")
    expect("the line", line.split()[0::3], ["beanstalkctl", "failed"])
    time.sleep(3)
    expect("the line after a refresh", browser.run("return getSelection().toString()"), line)
    browser.get(page)
    browser.click("#tubes td a")
    wait_until("the oldest job is shown", lambda: "#oldest" in browser.current_url and browser.text("#oldest th"))
    browser.set_size(360, 640, is_phone=True)
    browser.get(page)
    tops = browser.run("""return ["#attention li", "#tubes tbody tr"].map(selector =>
        document.querySelector(selector).getBoundingClientRect().top)""")
    expect(f"problems and tubes at {tops} are in view", tops[0] < 200 and tops[1] < 640)
    heads = browser.run("""return [...document.querySelectorAll("#tubes thead th")]
        .filter(cell => cell.offsetWidth > 0).map(cell => cell.textContent)""")
    expect("the columns of a phone", heads, ["tube", "ready", "buried", "oldest"])
    browser.set_size(1100, 800)


def check_order(page, browser, client):
    def is_sorted(column, direction, first):
        heads = browser.run("""return [...document.querySelectorAll("[aria-sort]")]
            .map(cell => [cell.textContent, cell.getAttribute("aria-sort")])""")
        return heads == [[column, direction]] and next(iter(table(browser))) == first

    browser.click("#tubes th:nth-child(2) a")
    wait_until("jobs are sorted", lambda: is_sorted("ready", "descending", "thumbnails"))
    expect("the address", browser.current_url.split("?")[1], "sort=ready")
    browser.click("#tubes th:nth-child(2) a")
    wait_until("the order is reversed", lambda: is_sorted("ready", "ascending", "default"))
    browser.click("#tubes th:nth-child(1) a")
    wait_until("names are sorted", lambda: is_sorted("tube", "ascending", ODD_TUBE))
    browser.back()
    wait_until("the last order is back", lambda: is_sorted("ready", "ascending", "default"))


def check_filter(page, browser, client):
    browser.type("input[name=filter]", "umb")
    expect_tubes(browser, "thumbnails")
    expect("the address", "filter=umb" in browser.current_url and "sort=-ready" in browser.current_url)
    expect("the focus", browser.run("return document.activeElement.name"), "filter")
    browser.type("input[name=filter]", '"><script>alert(1)</script>')
    expect_tubes(browser)
    browser.get(browser.current_url)
    value = browser.run("return document.querySelector('input[name=filter]').value")
    expect("the filter after a reload", value, 'umb"><script>alert(1)</script>')


def check_refresh(page, browser, client):
    browser.get(page)
    browser.run("window.isSamePage = true")
    before = int(table(browser)["mail"]["ready"])
    for _ in range(7):
        client.put(b"x", "mail")
    wait_until("new jobs are shown", lambda: int(table(browser)["mail"]["ready"]) == before + 7)
    wait_until("rates are known", lambda: table(browser)["mail"]["in/s"] != "-")
    points = 'return document.querySelector("svg polyline").points.length'
    wait_until("the plot has two points", lambda: browser.run(points) >= 2)
    # What a reader has selected stays selected: over some refreshes, one each second.
    browser.run("getSelection().selectAllChildren(document.querySelector('h1'))")
    time.sleep(3)
    expect("the selection", browser.run("return getSelection().toString()"), browser.text("h1"))
    browser.run("getSelection().removeAllRanges()")
    expect("the page", browser.run("return window.isSamePage"))


def check_tube(page, browser, client):
    browser.get(page)
    browser.run("[...document.links].find(link => link.textContent === arguments[0]).click()", ODD_TUBE)
    wait_until("the tube is shown", lambda: browser.text("h1") == ODD_TUBE)
    expect("the number of jobs, with the oldest one", len(browser.run(JOBS)), 11)
    expect("a body is shown", "secret" in browser.page_source, False)
    job = client.put(b"x", ODD_TUBE, pri=0)
    wait_until("a new job is shown", lambda: browser.run(JOBS)[1].startswith(f"ready{job}0"))
    browser.click("p a")
    wait_until("the server is shown", lambda: browser.current_url == page)


def check_policy(page, browser, client):
    browser.get(page)
    browser.run("""const script = document.createElement("script");
        script.textContent = "window.isBroken = true"; document.body.append(script);
        const style = document.createElement("style");
        style.textContent = "body { color: red }"; document.body.append(style);
        new Image().src = "/metrics";""")
    expect("a script runs", browser.run("return window.isBroken === true"), False)
    color = browser.run("return getComputedStyle(document.body).color")
    expect("a style applies", color == "rgb(255, 0, 0)", False)
    refused = [line for line in browser.console() if "Content Security Policy" in line]
    expect("the number of refusals", len(refused), 3)


def check_without_script(page, browser, client):
    """The page reloads itself here, every ten seconds: no step may rely on its being still there."""
    def is_filtered():
        """Filters a new page; a reload can swallow the click."""
        browser.get(page)
        browser.type("input[name=filter]", "mail")
        browser.click("button")
        with contextlib.suppress(AssertionError):
            return wait_until("the page shows it", lambda: list(table(browser)) == ["mail"], 5)

    def ready():
        """The ready jobs of a tube, or nothing while the page loads."""
        row = table(browser).get("mail")
        return row and int(row["ready"])

    browser.set_scripts(False)
    wait_until("one tube is shown", is_filtered)
    before = wait_until("jobs are counted", ready)
    browser.run("window.isSamePage = true")
    for _ in range(5):
        client.put(b"x", "mail")
    wait_until("the page has the jobs", lambda: ready() == before + 5)
    expect("the page is still the same", browser.run("return window.isSamePage === true"), False)
    browser.set_scripts(True)


def contrast(browser, selector):
    """The contrast of text with the background of the page (WCAG 2, section 1.4.3)."""
    colors = browser.run("""const element = document.querySelector(arguments[0]);
        return [getComputedStyle(element).color, getComputedStyle(document.body).backgroundColor]""",
        selector)
    lights = []
    for color in colors:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
                  for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def check_looks(page, browser, client):
    backgrounds = set()
    for is_dark in False, True:
        browser.set_dark(is_dark)
        browser.get(page)
        backgrounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
        for selector in "h1", "p", "dt", "dd", "tbody th a", "thead th a", "span.a", "span.b", "span.c", "li b", "code":
            expect(f"{selector} is readable", contrast(browser, selector) >= 4.5)
    expect("backgrounds", len(backgrounds), 2)
    for width in 320, 360, 390, 820, 1400:
        browser.set_size(width, 800, is_phone=width < 500)
        for path in "", "tube/mail":
            browser.get(page + path)
            wide = browser.run("return document.documentElement.scrollWidth")
            expect(f"the width of /{path} on a screen of {width} pixels", wide, width)
    browser.set_size(1100, 800)
    browser.set_dark(False)


def check_end(page, browser, server):
    """Runs last: it ends the server. The browser itself reports failed requests in the console."""
    browser.get(page)
    before = table(browser)
    server.stop()
    wait_until("the page shows that its values are old",
               lambda: "The values are old: " in browser.text("[role=status]"))
    expect("the values", table(browser).keys(), before.keys())


def main():
    with Server(sys.argv[1]) as server, Browser() as browser, server.connect() as client:
        page = f"http://{server.metrics}/"
        browser.set_size(1100, 800)
        fill(client)
        for check in (check_problems, check_order, check_filter, check_refresh, check_tube, check_policy,
                      check_without_script, check_looks):
            check(page, browser, client)
            expect(f"the console after {check.__name__}", browser.console(), [])
            print("ok", check.__name__)
        check_end(page, browser, server)
        print("ok check_end")


main()
