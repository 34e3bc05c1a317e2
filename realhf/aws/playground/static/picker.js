// The list of tasks with search and tiers. Choosing one calls `start({task_id})`, drawing one `start({tier})`.

import { element } from "./transcript.js";

const byId = (id) => document.getElementById(id);

export class Picker {
  constructor(tiers, start) {
    this.tasks = [];
    this.tier = "";
    this.start = start;
    for (const tier of ["", ...tiers]) byId("tiers").append(this.chip(tier));
    byId("search").addEventListener("input", () => this.show());
    byId("search").addEventListener("keydown", (event) => this.fromSearch(event));
    byId("task-list").addEventListener("keydown", (event) => this.walk(event));
    byId("draw").addEventListener("submit", (event) => {
      event.preventDefault();
      this.draw();
    });
  }

  chip(tier) {
    const label = element("label", "chip");
    const radio = element("input");
    radio.type = "radio";
    radio.name = "tier";
    radio.value = tier;
    radio.checked = tier === this.tier;
    radio.addEventListener("change", () => {
      this.tier = tier;
      this.show();
    });
    label.append(radio, element("span", "", tier || "all"));
    return label;
  }

  fill(tasks) {
    this.tasks = tasks;
    this.show();
  }

  show(current) {
    this.current = current ?? this.current;
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.tasks.filter((task) => {
      const text = `${task.task_id} ${task.tier} ${task.description}`.toLowerCase();
      return (!this.tier || task.tier === this.tier) && words.every((word) => text.includes(word));
    });
    byId("task-list").replaceChildren(...found.map((task) => this.row(task)));
    byId("task-list").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    byId("task-count").textContent = found.length === this.tasks.length ? `${found.length}`
      : `${found.length} of ${this.tasks.length}`;
  }

  row(task) {
    const item = element("li");
    const button = element("button", "task");
    button.type = "button";
    button.dataset.id = task.task_id;
    button.title = task.description;
    if (task.task_id === this.current) button.setAttribute("aria-current", "true");
    const labels = element("span", "labels");
    labels.append(element("span", `tier ${task.tier}`, task.tier), element("span", "number", `#${task.task_id}`));
    if (task.held_out) labels.append(element("span", "label", "held out"));
    button.append(labels, element("span", "text", task.description));
    button.addEventListener("click", () => this.start({ task_id: task.task_id }));
    item.append(button);
    return item;
  }

  draw() {
    this.start(this.tier ? { tier: this.tier } : {});
  }

  fromSearch(event) {
    if (event.key === "ArrowDown") {
      event.preventDefault();
      byId("task-list").querySelector("button")?.focus();
    } else if (event.key === "Enter") {
      byId("task-list").querySelector("button")?.click();
    }
  }

  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const rows = [...byId("task-list").querySelectorAll("button")];
    const next = rows.indexOf(document.activeElement) + step;
    if (next < 0) byId("search").focus();
    else rows[next]?.focus();
  }
}
