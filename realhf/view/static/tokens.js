// The tokens of a rollout with the quantities of engine and trainer: strips of all tokens, and a window of their texts.

import { $, h, holdingStill, number, tell } from "./dom.js";
import { chooseId, loadChange, loadRollout } from "./rollout.js";
import { DelayedTask } from "./store.js";

const WINDOW = 600;
const STRIPS = [
  ["engine", "log-probability at the engine", "low"], ["trainer", "log-probability at the trainer, before the step", "low"], ["new", "log-probability after the last pass", "low"],
  ["difference", "trainer minus engine", "both"], ["ratio", "ratio − 1", "both"], ["advantage", "advantage", "both"], ["version", "version", "scale"],
];
const HEIGHT = 13;
const WAIT_MS = 500;

export async function show(place, context) {
  const page = new Tokens(place, context);
  await page.load();
  return page;
}

class Tokens {
  constructor(place, context) {
    this.place = place;
    this.context = context;
    this.later = new DelayedTask(() => this.refresh());
    this.keys = [
      ["← →", "token"], ["↑ ↓", "60 tokens"], ["PgUp PgDn", "window"], ["Home End", "first, last"], ["m", "colour by the next quantity"], ["n", "next clipped token"], ["b", "back to the rollout"],
    ];
  }

  async load() {
    this.id = await chooseId(this.context, (all, at) => all.columns.tokens[at] === 3, (all, at) => all.columns.tokens[at] & 1);
    if (!this.id) return this.place.replaceChildren(h("p", {}, "No rollout was kept with its tokens yet (monitor.rollout_tokens)."));
    this.record = await loadRollout(this.context.run, this.id);
    this.draw();
  }

  draw() {
    const { play, train } = this.record;
    this.resized?.disconnect();
    this.stripImage = null;
    const bar = h("div", { class: "bar" }, h("h2", { class: "id" }, this.id), h("button", { type: "button", onclick: () => this.back() }, "Rollout", h("kbd", {}, "b")));
    if (!play.tokens) {
      this.hasNoTokens = true;
      return this.place.replaceChildren(bar, h("p", {}, play.problem ?? "The tokens of this rollout were not kept (monitor.rollout_tokens)."));
    }
    this.gather(play.tokens, train && !train.problem ? train : null);
    const requested = this.colour ?? this.context.params.get("colour");
    this.colour = this.strips.some(([name]) => name === requested) ? requested : this.strips[0][0];
    this.at = Math.min(this.size - 1, Math.max(0, Math.floor(Number(this.at ?? this.context.params.get("token"))) || 0));
    this.choice = h("select", { id: "colour", "aria-label": "Colour by", onchange: () => this.paint(this.choice.value) }, this.choices());
    this.canvas = h("canvas", { class: "strips", tabindex: "0", role: "img", "aria-label": "Strips of all tokens; arrows move" });
    this.canvas.addEventListener("click", (event) => this.move(Math.floor((event.offsetX / this.canvas.clientWidth) * this.size)));
    this.facts = h("dl", { class: "facts", id: "token", "aria-live": "polite" });
    this.texts = h("div", { class: "texts", tabindex: "0", "aria-label": "Texts of the tokens" });
    this.texts.addEventListener("click", (event) => event.target.dataset.at !== undefined && this.move(Number(event.target.dataset.at)));
    this.legend = h("span", { class: "legend", id: "legend" });
    this.names = h("div", { class: "strip-names", "aria-hidden": "true" });
    bar.append(h("label", { for: "colour" }, "Colour by"), this.choice, this.legend, h("span", { class: "muted" }, "dimmed: not trained · underlined: clipped"));
    this.note = h("p", { class: "muted" }, trainingNote(train));
    this.place.replaceChildren(bar, h("div", { class: "strips-frame" }, this.names, this.canvas), this.facts, this.note, this.texts);
    this.resized = new ResizeObserver(() => this.drawStrips());
    this.resized.observe(this.canvas);
    this.paint(this.colour);
  }

  choices() {
    return this.strips.map(([name, label]) => h("option", { value: name }, label));
  }

  /** Reload the rollout, which may have been trained by now. */
  async update(parts) {
    if (parts.has("rollouts")) this.later.schedule(WAIT_MS);
  }

  async refresh() {
    if (!this.record) return this.load();
    const now = await loadChange(this.context, this.record);
    if (!now || this.later.closed) return;
    const samePlay = JSON.stringify(now.play) === JSON.stringify(this.record.play);
    const sameTraining = JSON.stringify(now.train) === JSON.stringify(this.record.train);
    this.record = now;
    if (!samePlay) {
      this.hasNoTokens = false;
      this.draw();
    } else if (!sameTraining && !this.hasNoTokens) {
      holdingStill($("page"), [this.canvas, this.facts, this.texts], () => this.renewTraining(now));
    }
  }

  /** Show new data about the training. The token, the scroll position and a selected text stay. */
  renewTraining({ play, train }) {
    this.gather(play.tokens, train && !train.problem ? train : null);
    if (!this.strips.some(([name]) => name === this.colour)) this.colour = this.strips[0][0];
    this.choice.replaceChildren(...this.choices());
    this.choice.value = this.colour;
    this.drawLegend();
    tell(this.note, trainingNote(train));
    for (const one of this.texts.querySelectorAll(".token")) this.styleToken(one, Number(one.dataset.at));
    this.showToken();
    this.stripImage = null;
    this.drawStrips();
  }

  close() {
    this.resized?.disconnect();
    this.later.close();
  }

  /** Build one array per quantity over the tokens of the completion, with NaN for missing values. */
  gather(tokens, train) {
    const size = (this.size = tokens.ids.length);
    this.ids = tokens.ids;
    this.tokenTexts = tokens.texts ?? null;
    this.mask = Uint8Array.from(tokens.mask);
    this.clipped = new Uint8Array(size);
    this.starts = new Map((tokens.turn_starts ?? []).map((start, turn) => [start, turn]));
    const blank = () => new Float32Array(size).fill(NaN);
    this.values = { engine: blank(), trainer: blank(), new: blank(), difference: blank(), ratio: blank(), advantage: blank(), version: blank() };
    for (let at = 0; at < size; at++) {
      if (this.mask[at]) this.values.engine[at] = tokens.logprobs[at] ?? NaN;
      if (tokens.versions[at] >= 0) this.values.version[at] = tokens.versions[at];
    }
    if (train) this.gatherTrained(train, train.first_token - tokens.prompt_ids.length);
    this.strips = STRIPS.filter(([name]) => this.values[name].some((value) => !Number.isNaN(value)));
    if (!this.strips.length) this.strips = [STRIPS[0]];
    this.ranges = Object.fromEntries(this.strips.map(([name]) => [name, range(this.values[name])]));
  }

  gatherTrained(train, first) {
    for (let k = 0; k < train.mask.length; k++) {
      const at = first + k;
      if (at < 0 || at >= this.size || !train.mask[k]) continue;
      this.values.trainer[at] = train.before?.[k] ?? NaN;
      this.values.new[at] = train.new?.[k] ?? NaN;
      this.values.ratio[at] = (train.ratio?.[k] ?? NaN) - 1;
      this.values.advantage[at] = train.advantage?.[k] ?? NaN;
      this.values.difference[at] = this.values.trainer[at] - (train.old?.[k] ?? NaN);
      this.clipped[at] = train.clipped?.[k] ?? 0;
    }
  }

  paint(name) {
    this.colour = name;
    this.choice.value = name;
    this.drawLegend();
    this.first = -1;
    this.drawStrips();
    this.move(this.at);
  }

  /** Draw the legend: the values at both ends of the chosen quantity's scale. */
  drawLegend() {
    const { low, high } = this.ranges[this.colour];
    if (!(low <= high)) return this.legend.replaceChildren();
    const kind = STRIPS.find(([one]) => one === this.colour)[2];
    const mixed = (colour, share) => `color-mix(in srgb, var(--${colour}) ${share}%, transparent)`;
    const bound = Math.max(Math.abs(low), Math.abs(high));
    const [from, to, colours] = {
      low: [Math.min(low, 0), 0, [mixed("bad", 60), "transparent"]],
      both: [-bound, bound, [mixed("bad", 60), "transparent", mixed("k2", 60)]],
      scale: [low, high, low === high ? [mixed("k2", 24), mixed("k2", 24)] : [mixed("k2", 9), mixed("k2", 60)]],
    }[kind];
    const bar = h("i", {});
    bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
    this.legend.replaceChildren(number(from), bar, number(to));
  }

  move(at) {
    this.at = Math.max(0, Math.min(this.size - 1, at));
    const first = Math.floor(this.at / WINDOW) * WINDOW;
    if (first !== this.first) this.drawTexts(first);
    this.texts.querySelector("[aria-current]")?.removeAttribute("aria-current");
    const current = this.texts.querySelector(`[data-at="${this.at}"]`);
    current?.setAttribute("aria-current", "true");
    current?.scrollIntoView({ block: "nearest" });
    this.showToken();
    this.drawStrips();
    this.context.go("tokens", { id: this.id, token: this.at, colour: this.colour }, true);
  }

  showToken() {
    const { at } = this;
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    this.facts.replaceChildren(
      fact("token", `${(at + 1).toLocaleString("en")} of ${this.size.toLocaleString("en")}`), fact("text", showInvisible(this.tokenTexts?.[at] ?? "")), fact("id", String(this.ids[at])),
      ...this.strips.map(([name]) => fact(name === "ratio" ? "ratio" : name, Number.isNaN(this.values[name][at]) ? "–" : name === "ratio" ? (this.values.ratio[at] + 1).toFixed(4) : number(this.values[name][at]))),
      fact("trained", this.mask[at] ? "yes" : "no"), fact("clipped", this.clipped[at] ? "yes" : "no"),
    );
  }

  drawTexts(first) {
    this.first = first;
    const last = Math.min(this.size, first + WINDOW);
    const parts = [];
    for (let at = first; at < last; at++) {
      if (this.starts.has(at) && at > 0) parts.push(h("span", { class: "turn-mark" }, `turn ${this.starts.get(at) + 1}`));
      const text = this.tokenTexts?.[at] ?? `${this.ids[at]} `;
      const one = h("span", { "data-at": at }, showInvisible(text));
      this.styleToken(one, at);
      parts.push(one);
      if (text.includes("\n")) parts.push(h("br"));
    }
    this.texts.replaceChildren(...(first > 0 ? [h("p", { class: "muted" }, `tokens from ${(first + 1).toLocaleString("en")}; PgUp for the ones before`)] : []), ...parts, ...(last < this.size ? [h("p", { class: "muted" }, `${(this.size - last).toLocaleString("en")} more; PgDn`)] : []));
  }

  /** Show a token's mask, clipping and colour. */
  styleToken(one, at) {
    one.className = `token${this.mask[at] ? "" : " unmasked"}${this.clipped[at] ? " clipped" : ""}`;
    const [sign, share] = this.shade(this.colour, at);
    one.style.backgroundColor = share > 0.02 ? `color-mix(in srgb, var(--${sign < 0 ? "bad" : "k2"}) ${Math.round(60 * share)}%, transparent)` : "";
  }

  /** Sign and strength (0 to 1) of a quantity at a token. */
  shade(name, at) {
    const value = this.values[name][at];
    if (Number.isNaN(value)) return [1, 0];
    const { low, high } = this.ranges[name];
    const kind = STRIPS.find(([one]) => one === name)[2];
    if (kind === "low") return [-1, Math.min(1, value / (Math.min(low, -1e-6) || -1))];
    if (kind === "scale") return [1, high === low ? 0.4 : 0.15 + (0.85 * (value - low)) / (high - low)];
    const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return [value < 0 ? -1 : 1, Math.abs(value) / bound];
  }

  /** Draw the strips and the position of the token in them. The image of the strips is cached by width and colours. */
  drawStrips() {
    if (!this.canvas || !this.ranges) return;
    const width = this.canvas.clientWidth || 600;
    const height = (HEIGHT + 3) * this.strips.length + 6;
    const scale = devicePixelRatio || 1;
    const colour = (name) => { this.canvas.style.color = `var(${name})`; return getComputedStyle(this.canvas).color; };
    const colours = ["--bad", "--k2", "--ink", "--line"].map(colour);
    const key = [width, scale, ...colours].join(" ");
    if (this.stripImage?.key !== key) this.stripImage = { key, image: this.strip(width, height, scale, colours) };
    if (this.names.textContent !== this.strips.map(([name]) => name).join("")) this.names.replaceChildren(...this.strips.map(([name]) => h("span", {}, name)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.drawImage(this.stripImage.image, 0, 0);
    pen.scale(scale, scale);
    pen.fillStyle = colours[2];
    pen.fillRect((this.at / this.size) * width, 0, 2, height);
  }

  strip(width, height, scale, [bad, good, , line]) {
    const image = h("canvas", { width: width * scale, height: height * scale });
    const pen = image.getContext("2d");
    pen.scale(scale, scale);
    this.strips.forEach(([name], row) => {
      const y = row * (HEIGHT + 3);
      pen.globalAlpha = 1;
      pen.fillStyle = line;
      pen.fillRect(0, y, width, HEIGHT);
      const columns = Math.min(this.size, Math.ceil(width));
      for (let column = 0; column < columns; column++) {
        const from = Math.floor((column * this.size) / columns), to = Math.max(from + 1, Math.floor(((column + 1) * this.size) / columns));
        let [sign, share] = [1, 0];
        for (let at = from; at < to; at++) {
          const [one, strength] = this.shade(name, at);
          if (strength > share) [sign, share] = [one, strength];
        }
        pen.globalAlpha = share;
        pen.fillStyle = sign < 0 ? bad : good;
        pen.fillRect((column * width) / columns, y, Math.ceil(width / columns), HEIGHT);
      }
    });
    return image;
  }

  key(event) {
    if (!this.id) return false;
    if (event.key === "b") this.back();
    else if (this.hasNoTokens || !this.texts) return false;
    else {
      const does = {
        ArrowRight: () => this.move(this.at + 1), ArrowLeft: () => this.move(this.at - 1), ArrowDown: () => this.move(this.at + 60), ArrowUp: () => this.move(this.at - 60),
        PageDown: () => this.move(this.at + WINDOW), PageUp: () => this.move(this.at - WINDOW), Home: () => this.move(0), End: () => this.move(this.size - 1),
        m: () => this.paint(this.strips[(this.strips.findIndex(([name]) => name === this.colour) + 1) % this.strips.length][0]), n: () => this.nextClipped(),
      }[event.key];
      if (!does) return false;
      does();
    }
    return true;
  }

  nextClipped() {
    const after = this.clipped.indexOf(1, this.at + 1);
    const next = after >= 0 ? after : this.clipped.indexOf(1);
    if (next >= 0) this.move(next);
    else this.context.notice("No token of this rollout was clipped.");
  }

  back() {
    this.context.go("rollout", { id: this.id });
  }
}

const trainingNote = (train) => train?.problem ?? (train ? "" : "Nothing was recorded of its training: an evaluation, not trained yet, or without signal.");

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (Number.isNaN(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return { low, high };
}

/** A text with visible symbols for line ends, tabs and joiners. */
function showInvisible(text) {
  return text.replace(/\n/g, "⏎").replace(/\r/g, "␍").replace(/\t/g, "⇥").replace(/\u200c/g, "⟨U+200C⟩").replace(/\u200d/g, "⟨U+200D⟩");
}
