"""Shows the status page to a real browser: values, order, filter, refresh, the page of a tube, the
page without script, in the dark and on a phone. No step may print a message in the console.

Use: check.py SERVER"""
import re
import sys
import time

from server import Server
from webdriver import Browser, found_again, require_chromium, wait_until

TABLE = """
const rows = [...document.querySelectorAll("#tubes tbody tr")];
return rows.map(row => [...row.cells].map(cell => cell.textContent));
"""
HEADS = 'return [...document.querySelectorAll("#tubes thead th")].map(cell => cell.textContent)'
TOTALS = """
const values = document.querySelectorAll("#totals div");
return Object.fromEntries([...values].map(value => [...value.children].map(c => c.textContent.trim())));
"""


def expect(what, found, expected):
    assert found == expected, f"{what}: {found!r} instead of {expected!r}"


def table(browser):
    """The rows of the table, by the names of tubes and columns, in their order."""
    heads = browser.run(HEADS)
    return {row[0].strip(): dict(zip(heads, row)) for row in browser.run(TABLE)}


def expect_quiet(browser, step):
    expect(f"the console after {step}", browser.console(), [])
    print("ok", step)


def fill(client):
    """Jobs in each state, in tubes with all characters that names can have."""
    client.put("mail", 3)
    client.put("mail", 2, pri=5000, delay=500)
    client.put("a/b;c.d$e_f(g)+-", 12, body="secret")
    client.put("thumbnails", 1234, ttr=9000)
    client.ask("watch mail")
    client.ask(f"bury {client.ask('reserve')[1]} 7")
    client.ask("reserve")
    client.ask("pause-tube thumbnails 900")


def check_values(server, browser):
    browser.open(server.page)
    rows, totals, facts = table(browser), browser.run(TOTALS), server.facts()
    for title, key in ("ready", "ready"), ("reserved", "reserved"), ("tubes", "tubes"):
        expect(title, totals[title].replace(",", ""), str(facts["totals"][key]))
    expect("the title", browser.run("return document.title").startswith("beanstalkd on "), True)
    expect("the tubes", list(rows), [tube["name"] for tube in facts["tubes"]])
    for tube in facts["tubes"]:
        for key in "ready", "urgent", "reserved", "delayed", "buried", "waiting":
            found = rows[tube["name"]][key].replace(",", "")
            expect(f"{key} of {tube['name']}", found, str(tube[key]))
    expect("a number", rows["thumbnails"]["ready"], "1,234")
    expect("a pause", re.fullmatch("1[45]m [0-9]+s", rows["thumbnails"]["paused"]) is not None, True)
    expect_quiet(browser, "values")


def check_order(browser):
    def is_sorted(column, direction, first):
        heads = browser.run("""return [...document.querySelectorAll("[aria-sort]")]
            .map(cell => [cell.textContent, cell.getAttribute("aria-sort")])""")
        return heads == [[column, direction]] and next(iter(table(browser))) == first

    browser.click("#tubes th:nth-child(2) a")
    wait_until("jobs are sorted", lambda: is_sorted("ready", "descending", "thumbnails"))
    expect("the address", browser.url().split("?")[1], "sort=ready")
    browser.click("#tubes th:nth-child(2) a")
    wait_until("the order is reversed", lambda: is_sorted("ready", "ascending", "default"))
    browser.click("#tubes th:nth-child(1) a")
    wait_until("names are sorted", lambda: is_sorted("tube", "ascending", "a/b;c.d$e_f(g)+-"))
    browser.run("history.back()")
    wait_until("the last order is back", lambda: is_sorted("ready", "ascending", "default"))
    expect_quiet(browser, "order")


def check_filter(browser):
    browser.type("input[name=filter]", "umb")
    wait_until("one tube is shown", lambda: list(table(browser)) == ["thumbnails"])
    expect("the address", "filter=umb" in browser.url() and "sort=-ready" in browser.url(), True)
    expect("the focus", browser.run("return document.activeElement.name"), "filter")
    browser.type("input[name=filter]", '"><script>alert(1)</script>')
    wait_until("no tube is shown", lambda: not table(browser))
    browser.open(browser.url())
    value = browser.run("return document.querySelector('input[name=filter]').value")
    expect("the filter after a reload", value, 'umb"><script>alert(1)</script>')
    expect_quiet(browser, "filter")


def check_refresh(server, browser, client):
    browser.open(server.page)
    browser.run("window.isSamePage = true")
    before = table(browser)["mail"]["ready"]
    client.put("mail", 7)
    wait_until("new jobs are shown", lambda: int(table(browser)["mail"]["ready"]) == int(before) + 7)
    wait_until("rates are known", lambda: table(browser)["mail"]["puts/s"] != "-")
    points = 'return document.querySelector("svg polyline").points.length'
    wait_until("the plot has two points", lambda: browser.run(points) >= 2)
    # What a reader has selected stays selected.
    browser.run("getSelection().selectAllChildren(document.querySelector('h1'))")
    time.sleep(3)
    expect("the selection", browser.run("return getSelection().toString()"), "beanstalkd")
    browser.run("getSelection().removeAllRanges()")
    expect("the page", browser.run("return window.isSamePage"), True)
    expect_quiet(browser, "refresh")


def check_tube(server, browser, client):
    browser.open(server.page)
    name = "a/b;c.d$e_f(g)+-"
    browser.run("[...document.links].find(link => link.textContent === arguments[0]).click()", name)
    wait_until("the tube is shown", lambda: browser.text("h1") == name)
    rows = 'return [...document.querySelectorAll("#jobs tbody tr")].map(row => row.textContent)'
    expect("the number of jobs", len(browser.run(rows)), 10)
    expect("a body is shown", "secret" in browser.source(), False)
    [job] = client.put(name, 1, pri=0)
    wait_until("a new job is shown", lambda: browser.run(rows)[0].startswith(f"ready{job}0"))
    browser.click("p a")
    wait_until("the server is shown", lambda: browser.url() == server.page)
    expect_quiet(browser, "the page of a tube")


def check_policy(server, browser):
    browser.open(server.page)
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
    expect_quiet(browser, "the policy")


def check_without_script(server, browser, client):
    """The page reloads itself here, every ten seconds: no step may rely on its being still there."""
    def use_root(use):
        """Calls a function with the node of the page."""
        return found_again(lambda: use(browser.devtools("DOM.getDocument")["root"]["nodeId"]))

    def html():
        return use_root(lambda root: browser.devtools("DOM.getOuterHTML", nodeId=root)["outerHTML"])

    def center(selector):
        def find(root):
            found = browser.devtools("DOM.querySelector", nodeId=root, selector=selector)
            return browser.devtools("DOM.getBoxModel", nodeId=found["nodeId"])["model"]["content"]

        left, top, right, _, _, bottom, *_ = use_root(find)
        return (left + right) / 2, (top + bottom) / 2

    def click(selector):
        x, y = center(selector)
        for kind in "mousePressed", "mouseReleased":
            browser.devtools("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def names():
        return re.findall(r'<th scope="row"><a[^>]*>([^<]*)', html())

    def ready():
        """The ready jobs of a tube, or nothing while the page loads."""
        found = re.search(r"mail</a></th><td>(\d+)", html())
        return found and int(found[1])

    def try_again(what, act, holds):
        """Acts on a new page until its effect is seen: a reload can swallow a click."""
        def is_seen():
            browser.open(server.page)
            wait_until("the page is whole", lambda: "</html>" in html())
            act()
            try:
                return wait_until(what, holds, patience_s=5)
            except AssertionError:
                return False

        wait_until(what, is_seen)

    def filter_mail():
        click("input[name=filter]")
        browser.devtools("Input.insertText", text="mail")
        click("button")

    browser.set_scripts(False)
    browser.open(server.page)
    expect("tubes", set(names()) >= {"mail", "thumbnails", "default"}, True)
    try_again("names are sorted", lambda: click("#tubes th:nth-child(1) a"),
              lambda: names() and names() == sorted(names()))
    try_again("one tube is shown", filter_mail, lambda: names() == ["mail"])
    before = wait_until("jobs are counted", ready)
    client.put("mail", 5)
    wait_until("the page reloads itself", lambda: ready() == before + 5)
    browser.set_scripts(True)
    expect_quiet(browser, "the page without script")


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


def check_looks(server, browser):
    backgrounds = set()
    for is_dark in False, True:
        browser.set_dark(is_dark)
        browser.open(server.page)
        backgrounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
        for selector in "h1", "p", "dt", "dd", "tbody th a", "thead th a", "span.a", "span.b":
            expect(f"{selector} is readable", contrast(browser, selector) >= 4.5, True)
    expect("backgrounds", len(backgrounds), 2)
    for width in 320, 390, 820, 1400:
        browser.set_size(width, 800, is_phone=width < 500)
        for path in "", "tube/mail":
            browser.open(server.page + path)
            wide = browser.run("return document.documentElement.scrollWidth")
            expect(f"the width of /{path} on a screen of {width} pixels", wide, width)
    browser.set_size(1100, 800)
    browser.set_dark(False)
    expect_quiet(browser, "looks in the dark and on a phone")


def check_many_tubes(server, browser, client):
    for number in range(10_000):
        client.send(f"watch tube{number}")
        if number % 100 == 99:
            for _ in range(100):
                client.line()
    browser.open(server.page)
    expect("the number of rows", len(table(browser)), 100)
    more = browser.text("#more")
    expect("the other tubes", re.fullmatch("9,90[0-9] more tubes are not shown", more) is not None, True)
    browser.type("input[name=filter]", "tube9876")
    wait_until("any tube is found", lambda: list(table(browser)) == ["tube9876"])
    html = server.get("", "text/html")
    expect(f"{len(html)} bytes are below 30 KB", len(html) < 30_000, True)
    expect_quiet(browser, "10,000 tubes")


def check_end(server, browser):
    """Runs last: it ends the server. The browser itself reports failed requests in the console."""
    browser.open(server.page)
    before = table(browser)
    server.process.terminate()
    is_old = lambda: "The values are old: " in browser.text("[role=status]")
    wait_until("the page shows that its values are old", is_old)
    expect("the values", table(browser).keys(), before.keys())
    print("ok the end of the server")


def main():
    require_chromium("the status page is not shown to a browser")
    with Server(sys.argv[1]) as server, Browser() as browser:
        browser.set_size(1100, 800)
        client = server.client()
        fill(client)
        check_values(server, browser)
        check_order(browser)
        check_filter(browser)
        check_refresh(server, browser, client)
        check_tube(server, browser, client)
        check_policy(server, browser)
        check_without_script(server, browser, client)
        check_looks(server, browser)
        check_many_tubes(server, browser, client)
        check_end(server, browser)


main()
