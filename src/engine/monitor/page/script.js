"use strict";
// Fetches the page again and replaces the content of each element with an id. The server sorts and
// filters, so links and the form work without this script too.
const state = document.querySelector("[role=status]");
const filter = document.querySelector("input[name=filter]");
let latest = 0, timer;

async function refresh() {
  clearTimeout(timer);
  const request = ++latest, start = Date.now();
  try {
    const response = await fetch(location.href, {headers: {Accept: "text/html"}});
    const text = await response.text();
    if (request !== latest) return;
    if (!response.ok) throw new Error(response.status + " " + text.trim());
    if (getSelection().isCollapsed) show(new DOMParser().parseFromString(text, "text/html"));
    state.textContent = "";
  } catch (error) {
    if (request !== latest) return;
    state.textContent = "The values are old: " + error.message;
  }
  // A server that needs long for the page is asked less often.
  if (!document.hidden) timer = setTimeout(refresh, Math.max(2000, 10 * (Date.now() - start)));
}

function show(page) {
  const focused = document.activeElement.textContent;
  for (const part of document.querySelectorAll("[id]")) {
    const fresh = page.getElementById(part.id);
    if (!fresh) continue;
    const hadFocus = part.contains(document.activeElement);
    part.replaceChildren(...fresh.childNodes);
    if (!hadFocus) continue;
    const links = [...part.querySelectorAll("a")];
    links.find(link => link.textContent === focused)?.focus({preventScroll: true});
  }
}

function go(url, push) {
  history[push ? "pushState" : "replaceState"](null, "", url);
  refresh();
}

addEventListener("click", event => {
  const link = event.target.closest("thead a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.href, true);
});

function applyFilter() {
  const url = new URL(location.href);
  url.searchParams.set("filter", filter.value);
  if (!filter.value) url.searchParams.delete("filter");
  go(url, false);
}

if (filter) {
  let typing;
  filter.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(applyFilter, 150);
  });
  filter.form.addEventListener("submit", event => {
    event.preventDefault();
    applyFilter();
  });
  addEventListener("popstate", () => {
    filter.value = new URL(location.href).searchParams.get("filter") || "";
    refresh();
  });
}
addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : refresh());
timer = setTimeout(refresh, 2000);
