// Elements from data. Text only ever becomes text: request ids are whatever a client sent.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const number = (value) => Number(value).toLocaleString("en");

export const plural = (count, one, many = one + "s") => `${number(count)} ${count === 1 ? one : many}`;

export function ago(ns, now = Date.now()) {
  if (!ns) return "never";
  const seconds = Math.max(0, Math.round(now / 1000 - ns / 1e9));
  if (seconds < 90) return `${seconds} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

export const chip = (kind, text = kind) => h("span", { class: `chip ${kind}` }, text);

export function table(head, rows, caption) {
  const cell = (tag, value, attributes) => h(tag, attributes, ...(Array.isArray(value) ? value : [value]));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "skip" }, caption),
      h("thead", {}, h("tr", {}, head.map((name) => cell("th", name.replace(/^#/, ""), { scope: "col", class: name.startsWith("#") && "number" })))),
      h("tbody", {}, rows.map((row) => h("tr", row.attributes ?? {}, (row.cells ?? row).map((value, at) => cell("td", value, { class: head[at].startsWith("#") && "number" })))))));
}
