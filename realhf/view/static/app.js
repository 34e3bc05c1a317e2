// The frame: which page is shown, of which runs, keys, theme, and the request that waits for changes.

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
const MOST_COMPARED = 8;
const store = new Store();
const links = PAGES.map((one, at) => h("a", {}, one.title, h("kbd", { "aria-hidden": "true" }, String(at + 1))));
let shown = null;
const missed = new Set(); // parts that changed while a page was being made
let turn = 0;
let waiting = new AbortController();
let silent = false; // the server does not answer, and the page says so

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(query);
  const page = PAGES.find((one) => one.name === path) ?? PAGES[0];
  const numbers = (params.get("runs") ?? "").split(",").filter(Boolean).map(Number);
  const known = [...new Set(numbers)].filter((one) => store.runs[one]).slice(0, MOST_COMPARED);
  return { page, params, runs: known.length ? known : store.runs.length ? [store.first ?? 0] : [] };
}

/** Go to a page; `params` become part of the address, so that Back and a copied link lead to the same view. */
function go(name, params = {}, replace = false) {
  const query = new URLSearchParams({ runs: address().runs.join(","), ...params });
  if (replace && address().page.name !== name) return; // the answer came when another page was already open
  const hash = `#/${name}?${query}`;
  if (replace) history.replaceState(null, "", hash);
  else location.hash = hash;
}

/** Draw what stands around the page. It is drawn again whenever a run changes, so nothing is made anew that may have the
 * focus. */
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

/** Say how many runs are not listed, if there are any. */
function drawLeftOff() {
  const { count, one } = store.leftOff;
  const listed = store.runs.length.toLocaleString("en");
  tell($("choose-said"), count ? `${listed} of ${(store.runs.length + count).toLocaleString("en")} runs` : "Runs");
  $("left-off").hidden = !count;
  tell($("left-off"), count ? `The ${listed} that were written to last are listed. ${count.toLocaleString("en")} more are not, such as ${one}: name runs, or a folder with fewer of them, on the command line of python -m realhf.view.` : "");
}

function notice(text) {
  silent = false;
  tell($("notice"), text);
  $("notice").hidden = !text;
}

function noAnswer(text) {
  notice(text);
  silent = true;
}

async function showPage() {
  const mine = ++turn;
  const { page, params, runs } = address();
  shown?.close?.();
  shown = null;
  missed.clear();
  if (!silent) notice(""); // what was said of the page before
  drawFrame();
  const place = h("div", { class: `page ${page.name}` });
  $("page").replaceChildren(place);
  document.documentElement.dataset.page = "";
  if (!runs.length) return place.append(h("p", {}, "There are no runs here."));
  const unseen = runs.filter((one) => !Object.keys(store.runs[one].stamps).length);
  if (unseen.length) await learn(runs);
  if (mine !== turn) return;
  const context = { store, params, runs: runs.map((one) => store.runs[one]), run: store.runs[runs[0]], go, notice };
  try {
    const made = await page.module.show(place, context);
    if (mine !== turn) return made?.close?.();
    shown = made;
    if (missed.size) Promise.resolve(shown?.update?.(new Set(missed))).catch(() => {}); // the next request says it
    document.documentElement.dataset.page = page.name;
    // What had the focus went with the page before: Tab goes on from the new page, and not from the top.
    if (document.documentElement.dataset.ready && document.activeElement === document.body) $("page").focus({ preventScroll: true });
  } catch (error) {
    if (mine === turn) place.append(h("p", { class: "problem" }, `This cannot be shown: ${error.message}`));
  }
}

/** Learn the present state of runs that were not looked at before, and wait for theirs from now on. */
async function learn(runs) {
  store.seen = "";
  await store.changes(runs).catch((error) => noAnswer(`The server does not answer: ${error.message}`));
  waiting.abort();
}

/** Wait until somebody looks at the page. A browser has six connections to a server for all its pages, and each one that
 * waits for changes holds one. */
async function seen() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

async function followChanges() {
  while (store.follow) {
    await seen();
    const { runs } = address();
    waiting = new AbortController();
    try {
      const changed = await store.changes(runs, waiting.signal);
      if (silent) notice("");
      drawFrame();
      const parts = new Set([...changed.entries()].filter(([one]) => !store.runs[one].isGone).flatMap(([, set]) => [...set]));
      if (!shown) for (const part of parts) missed.add(part);
      else if (parts.size) await shown.update?.(parts);
    } catch (error) {
      if (error.name === "AbortError") continue;
      noAnswer(`The server does not answer (${error.message}). What was loaded stays; trying again.`);
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
  else if (!shown?.key?.(event)) return;
  event.preventDefault();
}

function openKeys() {
  const rows = [
    ["1–" + PAGES.length, "pages"],
    ["c", "choose runs"],
    ["d", "theme"],
    ["Tab, Enter", "from one control to the next; open"],
    ["Esc", "out of a field"],
    ...(shown?.keys ?? []),
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

/** Show the runs whose boxes are checked, those that are shown already before the others. What the address says of the
 * first one stays, if it stays the first. */
function chooseRuns() {
  const checked = [...$("runs-list").querySelectorAll("input:checked")].map((one) => Number(one.value));
  if ($("runs").returnValue !== "show" || !checked.length) return;
  const { page, params, runs } = address();
  const shownFirst = [...runs.filter((one) => checked.includes(one)), ...checked.filter((one) => !runs.includes(one))];
  const boxes = shownFirst.slice(0, MOST_COMPARED);
  go(page.name, { ...(boxes[0] === runs[0] ? Object.fromEntries(params) : {}), runs: boxes.join(",") });
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
    const wanted = event.target.value.toLowerCase();
    for (const line of $("runs-list").children) line.hidden = !line.dataset.name.includes(wanted);
  });
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", showPage);
  try {
    await store.refresh();
    await showPage();
  } catch (error) {
    noAnswer(`The server does not answer: ${error.message}`);
    return;
  }
  document.documentElement.dataset.ready = "yes";
  followChanges();
}

main();
