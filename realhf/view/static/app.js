// The frame of all pages: navigation, choice of runs, keys, theme, and the request that waits for changes.

import { $, h, skipLink, tell } from "./dom.js";
import { Store } from "./store.js";
import { themeOf } from "./theme.js";
import * as advisories from "./advisories.js";
import * as overview from "./overview.js";
import * as rollout from "./rollout.js";
import * as rollouts from "./rollouts.js";
import * as tasks from "./tasks.js";
import * as timeline from "./timeline.js";
import * as tokens from "./tokens.js";

const PAGES = [
  { name: "overview", title: "Overview", module: overview },
  { name: "advisories", title: "Advisories", module: advisories },
  { name: "timeline", title: "Timeline", module: timeline },
  { name: "rollouts", title: "Rollouts", module: rollouts },
  { name: "rollout", title: "Rollout", module: rollout },
  { name: "tokens", title: "Tokens", module: tokens },
  { name: "tasks", title: "Tasks", module: tasks },
];
const RETRY_MS = 2000;
const MAX_COMPARED = 8;
const store = new Store();
const links = PAGES.map((one, at) => h("a", {}, one.title, h("kbd", { "aria-hidden": "true" }, String(at + 1))));
let view = null; // the page that is shown
const missedParts = new Set(); // parts that changed while a page was loading
let showCount = 0; // number of calls of showPage
let waiting = new AbortController(); // aborts the request that waits for changes
let isServerSilent = false; // the server does not answer, and the notice says so

/** Page, parameters and numbers of the runs in the address. */
function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query);
  const page = PAGES.find((one) => one.name === path) ?? PAGES[0];
  const numbers = (params.get("runs") ?? "").split(",").filter(Boolean).map(Number);
  const existing = [...new Set(numbers)].filter((one) => store.runs[one]).slice(0, MAX_COMPARED);
  return { page, params, runs: existing.length ? existing : store.runs.length ? [store.first ?? 0] : [] };
}

/** Go to a page; `params` become part of the address, so that Back and a copied link lead to the same view. */
function go(name, params = {}, replace = false) {
  const query = new URLSearchParams({ runs: address().runs.join(","), ...params });
  if (replace && address().page.name !== name) return; // the answer came when another page was already open
  const hash = `#/${name}?${query}`;
  if (replace) history.replaceState(null, "", hash);
  else location.hash = hash;
}

/** Draw the frame. It is drawn again whenever a run changes, so elements that may have the focus are changed in place. */
function drawFrame() {
  const { page, runs } = address();
  const run = store.runs[runs[0]];
  tell($("title"), run ? run.name : "realhf view");
  document.title = run ? `${run.name} · ${page.title}` : "realhf view";
  const others = runs.length > 1 ? ` Compared with ${runs.length - 1} more.` : "";
  tell($("state"), run ? run.text + others : "");
  $("state").dataset.state = run?.state ?? "";
  drawLeftOff();
  PAGES.forEach((one, at) => {
    links[at].href = `#/${one.name}?runs=${runs.join(",")}`;
    if (one === page) links[at].setAttribute("aria-current", "page");
    else links[at].removeAttribute("aria-current");
  });
}

/** Show how many runs are not listed, if any. */
function drawLeftOff() {
  const { count, one } = store.leftOff;
  const listed = store.runs.length.toLocaleString("en");
  tell($("choose-label"), count ? `${listed} of ${(store.runs.length + count).toLocaleString("en")} runs` : "Runs");
  $("left-off").hidden = !count;
  tell($("left-off"), count ? `The ${listed} that were written to last are listed. ${count.toLocaleString("en")} more are not, such as ${one}: name runs, or a folder with fewer of them, on the command line of python -m realhf.view.` : "");
}

function notice(text) {
  isServerSilent = false;
  tell($("notice"), text);
  $("notice").hidden = !text;
}

function reportSilence(text) {
  notice(text);
  isServerSilent = true;
}

async function showPage() {
  const request = ++showCount;
  const { page, params, runs } = address();
  view?.close?.();
  view = null;
  missedParts.clear();
  if (!isServerSilent) notice(""); // about the page before
  drawFrame();
  const place = h("div", { class: `page ${page.name}` });
  $("page").replaceChildren(place);
  document.documentElement.dataset.page = "";
  if (!runs.length) return place.append(h("p", {}, "There are no runs here."));
  const unloaded = runs.filter((one) => !Object.keys(store.runs[one].stamps).length);
  if (unloaded.length) await loadStates(runs);
  if (request !== showCount) return;
  const context = { store, params, runs: runs.map((one) => store.runs[one]), run: store.runs[runs[0]], go, notice };
  try {
    const loaded = await page.module.show(place, context);
    if (request !== showCount) return loaded?.close?.();
    view = loaded;
    if (missedParts.size) Promise.resolve(view?.update?.(new Set(missedParts))).catch(() => {}); // the next request reports the error
    document.documentElement.dataset.page = page.name;
    // The element with the focus was removed with the page before; Tab continues from the new page, not from the top.
    if (document.documentElement.dataset.ready && document.activeElement === document.body) $("page").focus({ preventScroll: true });
  } catch (error) {
    if (request === showCount) place.append(h("p", { class: "problem" }, `This cannot be shown: ${error.message}`));
  }
}

/** Load the states of runs that were not shown before, and restart the wait for changes with these runs. */
async function loadStates(runs) {
  store.knownState = "";
  await store.changes(runs).catch((error) => reportSilence(`The server does not answer: ${error.message}`));
  waiting.abort();
}

/** Wait until the page is visible. A browser has six connections to a server for all its pages, and each page that waits
 * for changes uses one. */
async function pageVisible() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

async function followChanges() {
  while (store.follow) {
    await pageVisible();
    const { runs } = address();
    waiting = new AbortController();
    try {
      const changed = await store.changes(runs, waiting.signal);
      if (isServerSilent) notice("");
      drawFrame();
      const parts = new Set([...changed.entries()].filter(([one]) => !store.runs[one].isGone).flatMap(([, set]) => [...set]));
      if (!view) for (const part of parts) missedParts.add(part);
      else if (parts.size) await view.update?.(parts);
    } catch (error) {
      if (error.name === "AbortError") continue;
      reportSilence(`The server does not answer (${error.message}). What was loaded stays; trying again.`);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

const KEYS = {
  c: () => openRuns(),
  "?": () => openKeys(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const inField = event.target.closest("input, select, textarea");
  if (event.key === "Escape" && inField) return inField.blur();
  if (inField) return;
  const page = PAGES[Number(event.key) - 1];
  if (/^[1-9]$/.test(event.key) && page) go(page.name);
  else if (KEYS[event.key]) KEYS[event.key]();
  else if (!view?.key?.(event)) return;
  event.preventDefault();
}

function openKeys() {
  const rows = [
    ["1–" + PAGES.length, "pages"],
    ["c", "choose runs"],
    ["d", "theme"],
    ["Tab, Enter", "from one control to the next; open"],
    ["Esc", "out of a field"],
    ...(view?.keys ?? []),
  ];
  $("keys-list").replaceChildren(...rows.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does))));
  $("keys").showModal();
}

async function openRuns() {
  await store.refresh().catch(() => {});
  drawLeftOff();
  const chosen = new Set(address().runs);
  const line = (run) =>
    h(
      "li",
      { "data-name": [run.name, ...run.tags].join(" ").toLowerCase() },
      h(
        "label",
        {},
        h("input", { type: "checkbox", value: run.number, checked: chosen.has(run.number) }),
        h("span", {}, run.name),
        h("span", {}, run.tags.map((tag) => h("span", { class: "tag" }, tag))),
        h("span", { class: "muted" }, `${run.state}, ${run.steps} ${run.steps === 1 ? "step" : "steps"}`),
      ),
    );
  $("runs-list").replaceChildren(...store.runs.map(line));
  $("runs-search").value = "";
  $("runs").returnValue = "";
  $("runs").showModal();
}

/** Show the checked runs, those that are already shown first. The parameters of the address are kept if the first run
 * stays the same. */
function chooseRuns() {
  const checked = [...$("runs-list").querySelectorAll("input:checked")].map((one) => Number(one.value));
  if ($("runs").returnValue !== "show" || !checked.length) return;
  const { page, params, runs } = address();
  const ordered = [...runs.filter((one) => checked.includes(one)), ...checked.filter((one) => !runs.includes(one))];
  const chosen = ordered.slice(0, MAX_COMPARED);
  go(page.name, { ...(chosen[0] === runs[0] ? Object.fromEntries(params) : {}), runs: chosen.join(",") });
}

async function main() {
  $("pages").append(...links);
  KEYS.d = themeOf($("theme"));
  skipLink();
  document.addEventListener("visibilitychange", () => document.hidden && waiting.abort());
  $("help").addEventListener("click", openKeys);
  $("choose").addEventListener("click", openRuns);
  $("runs").addEventListener("close", chooseRuns);
  $("runs-search").addEventListener("input", (event) => {
    const needle = event.target.value.toLowerCase();
    for (const line of $("runs-list").children) line.hidden = !line.dataset.name.includes(needle);
  });
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", showPage);
  try {
    await store.refresh();
    await showPage();
  } catch (error) {
    reportSilence(`The server does not answer: ${error.message}`);
    return;
  }
  document.documentElement.dataset.ready = "yes";
  followChanges();
}

main();
