// What there is in the account: one card per service, what the last command made or removed marked.

import { element } from "./transcript.js";

const names = (state, service, kind) => state?.[service]?.[kind] ?? [];

export function cards(now, before) {
  const services = [...new Set([...Object.keys(now), ...Object.keys(before ?? {})])].sort();
  return services.map((service) => card(service, now, before)).filter((made) => made !== null);
}

function card(service, now, before) {
  const kinds = [...new Set([...Object.keys(now[service] ?? {}), ...Object.keys(before?.[service] ?? {})])].sort();
  const made = element("section", "card");
  const count = kinds.reduce((sum, kind) => sum + names(now, service, kind).length, 0);
  const title = element("h3", "", service);
  title.append(element("span", "count", String(count)));
  made.append(title);
  for (const kind of kinds) {
    const list = element("ul");
    list.setAttribute("aria-label", kind);
    const had = new Set(before ? names(before, service, kind) : names(now, service, kind));
    const has = new Set(names(now, service, kind));
    for (const name of [...new Set([...has, ...had])].sort()) {
      const change = !had.has(name) ? "new" : has.has(name) ? "" : "gone";
      const item = element("li", change, name);
      item.title = name;
      if (change) item.append(element("span", "change", change));
      list.append(item);
    }
    made.append(element("h4", "", kind), list);
  }
  return kinds.length ? made : null;
}
