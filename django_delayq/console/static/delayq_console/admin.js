// Refreshes the regions of a page: fetches the page again and replaces each element marked with data-dq-region.
(function () {
  "use strict";
  const CHOICES = [0, 2, 5, 15, 60], KEY = "delayq.refresh", TIMEOUT_MS = 10000, MAX_SECONDS = 120;
  const live = document.querySelector("[data-dq-live]");
  const regions = () => document.querySelectorAll("[data-dq-region]");
  if (!live || !regions().length || !window.fetch) return;
  const words = live.dataset;
  let every = remembered(), failures = 0, timer = 0, busy = false, last = new Date();

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
    try { localStorage.setItem(KEY, select.value); } catch (e) { /* not kept, then */ }
    plan();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (every) refresh();
  });
  plan();

  function remembered() {
    let kept = null;
    try { kept = localStorage.getItem(KEY); } catch (e) { /* private mode */ }
    const found = kept === null ? 5 : Number(kept);
    return CHOICES.includes(found) ? found : 5;
  }

  function plan() {
    clearTimeout(timer);
    if (!every || document.hidden) return;
    const wait = failures ? Math.max(every, Math.min(MAX_SECONDS, every * 2 ** failures)) : every;
    timer = setTimeout(refresh, wait * 1000);
  }

  function refresh() {
    clearTimeout(timer);
    if (busy) return;
    if (!every || document.hidden || selecting()) return plan();
    busy = true;
    const abort = new AbortController();
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
        if (every && !selecting()) regions().forEach((region) => swap(region, fresh));
        failures = 0;
        last = new Date();
        say(words.updated, false);
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

  function swap(region, fresh) {
    const name = CSS.escape(region.dataset.dqRegion);
    const next = fresh.querySelector('[data-dq-region="' + name + '"]');
    if (!next || region.contains(document.activeElement) || dirty(region)) return;
    const open = Array.from(region.querySelectorAll("details"), (one) => one.open);
    next.querySelectorAll("details").forEach((one, place) => { if (open[place] !== undefined) one.open = open[place]; });
    if (next.outerHTML !== region.outerHTML) region.replaceWith(document.importNode(next, true));
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

  function say(word, stale) {
    status.textContent = word + " " + last.toLocaleTimeString([], { hourCycle: "h23" });
    status.classList.toggle("dq-stale", stale);
  }
})();
