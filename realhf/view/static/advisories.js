// The advisories about a run, with links to the rollouts that show the problem.

import { h, renew } from "./dom.js";
import { askJson } from "./store.js";
import { FILTERS } from "./table.js";

export async function show(place, context) {
  const page = new Advisories(place, context);
  await page.load();
  return page;
}

class Advisories {
  constructor(place, context) {
    this.context = context;
    this.keys = [["j k", "next, previous advisory"], ["Enter", "to the rollouts that show it"]];
    this.status = h("p", { class: "readout", role: "status" });
    this.list = h("ol", { class: "advisory-list", id: "advisories" });
    place.append(this.status, this.list);
    this.at = -1;
  }

  async load() {
    const { run } = this.context;
    if (run.isGone) return (this.status.textContent = "The folder is gone.");
    const advisories = await askJson(`/api/runs/${run.number}/advisories`);
    if (JSON.stringify(advisories) === JSON.stringify(this.advisories)) return;
    this.advisories = advisories;
    this.status.textContent = this.advisories.length ? `${this.advisories.length} to look at in ${run.name}` : `Nothing seems wrong with ${run.name}.`;
    const active = document.activeElement;
    const focusedId = this.list.contains(active) ? active.closest(".advisory").dataset.id : null;
    const inLink = active.matches("a");
    renew(this.list, h("ol", { class: "advisory-list", id: "advisories" }, this.advisories.map((one) => this.item(one))));
    if (focusedId !== null) this.focusOn(focusedId, inLink);
  }

  async update(parts) {
    if (parts.has("metrics") || parts.has("evaluations")) await this.load();
  }

  /** Give the focus to an advisory, which may have moved in the list; to the last one if it is gone. */
  focusOn(id, inLink) {
    const items = [...this.list.children];
    const index = items.findIndex((one) => one.dataset.id === id);
    const item = items.at(index);
    if (!item) return;
    this.at = items.indexOf(item);
    const target = (inLink && item.querySelector("a")) || item;
    if (target !== document.activeElement) target.focus({ preventScroll: true });
  }

  item(one) {
    const link = this.link(one.filter);
    return h(
      "li",
      { class: `advisory ${one.severity}`, "data-id": one.id, tabindex: "0" },
      h("p", {}, h("b", { class: "severity" }, one.severity), h("span", { class: "muted" }, ` since step ${one.since}`)),
      h("p", { class: "text" }, one.text),
      h("p", { class: "muted" }, one.advice),
      link ? h("a", { href: link }, "Rollouts that show it") : null,
    );
  }

  link(filter) {
    const supported = Object.entries(filter ?? {}).filter(([name]) => FILTERS.includes(name) || name === "sort" || name === "order");
    if (!supported.length) return null;
    return `#/rollouts?${new URLSearchParams({ runs: this.context.runs.map((run) => run.number).join(","), ...Object.fromEntries(supported) })}`;
  }

  key(event) {
    const offset = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (offset) {
      this.at = Math.max(0, Math.min(this.list.children.length - 1, this.at + offset));
      this.list.children[this.at]?.focus();
    } else if (event.key === "Enter" && event.target.matches?.(".advisory")) {
      const link = event.target.querySelector("a");
      if (link) location.hash = link.getAttribute("href");
    } else return false;
    return true;
  }
}
