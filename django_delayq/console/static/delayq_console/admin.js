// Fetches the page again and replaces each element marked with data-dq-region.
// A region that cannot be replaced, because somebody uses it, is marked with the time it was read.
(function () {
  "use strict";
  const CHOICES = [0, 2, 5, 15, 60], KEY = "delayq.refresh", TIMEOUT_MS = 10000, MAX_SECONDS = 120;
  // A page that took a second is asked for again after five.
  const PAUSE = 5;
  const live = document.querySelector("[data-dq-live]");
  const regions = () => document.querySelectorAll("[data-dq-region]");
  if (!live || !regions().length || !window.fetch) return;
  const words = live.dataset, read = new WeakMap(), opened = new Date();
  let every = remembered(), failures = 0, timer = 0, busy = false, last = opened, took = 0, slow = isSlow(document);

  const label = document.createElement("label");
  const select = document.createElement("select");
  const status = document.createElement("span");
  label.append(words.label + " ", select);
  for (const choice of CHOICES) {
    select.add(new Option(choice ? choice + " " + words.seconds : words.off, String(choice), false, choice === every));
  }
  status.className = "dq-status";
  status.setAttribute("role", "status");
  live.append(label, status);
  select.addEventListener("change", () => {
    every = Number(select.value);
    failures = 0;
    try { localStorage.setItem(KEY, select.value); } catch (e) { /* not kept */ }
    plan();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (every && !slow) refresh();
  });
  plan();

  function remembered() {
    let kept = null;
    try { kept = localStorage.getItem(KEY); } catch (e) { /* private mode */ }
    const found = kept === null ? 5 : Number(kept);
    return CHOICES.includes(found) ? found : 5;
  }

  function isSlow(page) {
    return Boolean(page.querySelector("[data-dq-slow]"));
  }

  function plan() {
    clearTimeout(timer);
    if (slow) return say(words.slow, true);
    if (!every || document.hidden) return;
    const wait = failures ? Math.max(every, Math.min(MAX_SECONDS, every * 2 ** failures)) : Math.max(every, PAUSE * took);
    timer = setTimeout(refresh, wait * 1000);
  }

  function refresh() {
    clearTimeout(timer);
    if (busy) return;
    if (!every || document.hidden || selecting()) return plan();
    busy = true;
    const abort = new AbortController(), begin = performance.now();
    const limit = setTimeout(() => abort.abort(), TIMEOUT_MS);
    fetch(location.href, { credentials: "same-origin", cache: "no-store", signal: abort.signal })
      .then((answer) => {
        // A redirect most likely leads to the login page.
        if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
        return answer.text();
      })
      .then((html) => {
        const fresh = new DOMParser().parseFromString(html, "text/html");
        if (!fresh.querySelector("[data-dq-region]")) throw new Error("another page");
        took = (performance.now() - begin) / 1000;
        failures = 0;
        if (!every || selecting()) return;
        last = new Date();
        slow = isSlow(fresh);
        const kept = Array.from(regions(), (region) => swap(region, fresh)).includes(false);
        say(kept ? words.partly : words.updated, kept);
      })
      .catch(() => {
        failures += 1;
        say(words.stale, true);
      })
      .then(() => {
        clearTimeout(limit);
        busy = false;
        plan();
      });
  }

  // Returns false when the region keeps what was read before.
  function swap(region, fresh) {
    const next = fresh.querySelector('[data-dq-region="' + CSS.escape(region.dataset.dqRegion) + '"]');
    const note = region.querySelector(":scope > .dq-old");
    if (note) note.remove();
    if (next && "dqRows" in region.dataset && (boxes(region).size || boxes(next).size)) return swapRows(region, next);
    if (next && plain(next) === plain(region)) {
      read.set(region, last);
      return true;
    }
    if (!next || region.contains(document.activeElement) || region.querySelector(":active") || dirty(region)) {
      region.prepend(old(read.get(region) || opened));
      return false;
    }
    const open = Array.from(region.querySelectorAll("details"), (one) => one.open);
    next.querySelectorAll("details").forEach((one, place) => { if (open[place] !== undefined) one.open = open[place]; });
    const put = document.importNode(next, true), left = region.scrollLeft;
    region.replaceWith(put);
    put.scrollLeft = left;
    read.set(put, last);
    return true;
  }

  // Rows that can be ticked stay in place, so that nobody ticks another than the one aimed at: their cells are
  // replaced, rows that are gone are greyed, and a note leads to the list as it is now.
  function swapRows(region, next) {
    const shown = boxes(region), fresh = boxes(next);
    for (const [id, row] of shown) {
      const now = fresh.get(id);
      row.classList.toggle("dq-gone", !now);
      Array.from(now ? now.cells : [], (cell, place) => {
        const was = row.cells[place];
        if (!was || was.querySelector(".action-select") || was.outerHTML === cell.outerHTML) return;
        was.replaceWith(document.importNode(cell, true));
      });
    }
    const changed = Array.from(shown.keys()).join() !== Array.from(fresh.keys()).join();
    region.querySelectorAll("[data-dq-changed]").forEach((one) => { one.hidden = !changed; });
    return !changed;
  }

  function boxes(region) {
    const found = region.querySelectorAll("tr .action-select");
    return new Map(Array.from(found, (box) => [box.value, box.closest("tr")]));
  }

  function plain(region) {
    const copy = region.cloneNode(true);
    // Each answer has another token, and readers open details.
    copy.querySelectorAll("[name=csrfmiddlewaretoken]").forEach((one) => one.remove());
    copy.querySelectorAll("details").forEach((one) => one.removeAttribute("open"));
    return copy.outerHTML;
  }

  function old(at) {
    const note = document.createElement("p");
    note.className = "dq-old";
    note.textContent = words.old + " " + clock(at);
    return note;
  }

  function selecting() {
    const selection = window.getSelection();
    return Boolean(selection) && !selection.isCollapsed;
  }

  function dirty(region) {
    return Array.from(region.querySelectorAll("input, select, textarea")).some((field) => {
      if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
      if (field.options) return Array.from(field.options).some((one) => one.selected !== one.defaultSelected);
      return field.value !== field.defaultValue;
    });
  }

  function clock(at) {
    return at.toLocaleTimeString([], { hourCycle: "h23" });
  }

  function say(word, stale) {
    status.textContent = word + " " + clock(last);
    status.classList.toggle("dq-stale", stale);
  }
})();

// Shows the tab of this page. "/" leads to the search for messages, "?" shows the keys.
(function () {
  "use strict";
  const [keys, box, tab] = ["[data-dq-keys]", "#searchbar", ".dq-nav [aria-current]"].map((one) => document.querySelector(one));
  if (tab) tab.closest("ul").scrollLeft = tab.offsetLeft - 99;
  if (!keys) return;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
    if (event.key === "?") keys.showModal();
    if (event.key !== "/") return;
    event.preventDefault();
    if (box) box.focus();
    else if (keys.dataset.dqKeys) location.assign(keys.dataset.dqKeys + "#searchbar");
  });
  if (box && location.hash === "#searchbar") box.focus();
})();

// Copies what is before a button, on HTTP too.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-dq-copy]"), chosen = getSelection();
  if (!button) return;
  const word = button.textContent;
  chosen.selectAllChildren(button.previousElementSibling);
  if (document.execCommand("copy")) button.textContent = button.dataset.dqCopy;
  chosen.removeAllRanges();
  setTimeout(() => { button.textContent = word; }, 1000);
});
