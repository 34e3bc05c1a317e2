// Makes elements. Text of a run is only ever set as text, so nothing in it is interpreted.

const SVG = "http://www.w3.org/2000/svg";
const READ_ALOUD = new Set(["title", "aria-label", "placeholder"]);
/** Control characters (but ends of lines and tabs), marks of direction, and what has no width: text could hide or turn
 * around other text with them. What joins letters and emojis stays. */
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;

/** Return a text with invisible characters replaced by their code points. */
export const shown = (text) => text.replace(UNSEEN, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const readable = (value) => (typeof value === "string" ? shown(value) : value);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = readable(value);
    else element.setAttribute(name, value === true ? "" : READ_ALOUD.has(name) ? readable(value) : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(readable));
  return element;
}

/** An HTML element; `on<event>` adds a listener, `text` sets the text. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An element of SVG. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export const $ = (id) => document.getElementById(id);

/** A number as a person reads it. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

/** A table whose cells are text or elements. */
export function table(heads, rows, attributes = {}) {
  const cell = (name, content, extra = {}) => h(name, extra, content instanceof Node ? content : String(content ?? ""));
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      attributes,
      h("thead", {}, h("tr", {}, heads.map((head) => cell("th", head, { scope: "col" })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((content) => cell("td", content))))),
    ),
  );
}

/** Set the text of an element if it differs: screen readers repeat a status whenever it is set. */
export function tell(element, text) {
  const displayText = shown(text);
  if (element.textContent !== displayText) element.textContent = displayText;
}

/** Update a part of a page in place to match a newer one, so that focus, selection, scroll position and open state stay.
 * For parts without event listeners of their own. */
export function renew(old, newer) {
  if (old.isEqualNode(newer)) return;
  if (old.nodeName !== newer.nodeName) return old.replaceWith(newer);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== newer.data) old.data = newer.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (name !== "open" && !newer.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of newer.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // a page may forbid the attribute
    else old.setAttribute(name, value);
  }
  const [had, has] = [[...old.childNodes], [...newer.childNodes]];
  has.forEach((child, at) => (had[at] ? renew(had[at], child) : old.append(child)));
  for (const child of had.slice(has.length)) child.remove();
}

/** Change parts of a page that scrolls in `frame`. The last of `parts` that begins above the middle of what is seen, which
 * is the one that is read, stays where it is on the screen; at the top of the page none has to. */
export function holdingStill(frame, parts, change) {
  const { top, height } = frame.getBoundingClientRect();
  const anchor = frame.scrollTop > 0 && parts.findLast((one) => one.getBoundingClientRect().top < top + height / 2);
  const before = anchor && anchor.getBoundingClientRect().top;
  frame.style.overflowAnchor = "none"; // the browser would hold another part
  change();
  if (anchor) frame.scrollTop += anchor.getBoundingClientRect().top - before;
  frame.style.overflowAnchor = "";
}

/** Let the skip link of a page give the focus to its target and leave the address as it is: it says what is shown. */
export function skipLink() {
  const link = document.querySelector(".skip");
  link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).focus();
  });
}
