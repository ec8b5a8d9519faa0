// Which view the address names, the token, the theme, and whether the collector can be reached.

import { Refused, follow, forgetToken, get, keepToken, onConnection, token } from "./api.js";
import { h } from "./dom.js";
import { engineView } from "./engine.js";
import { incidentList, incidentView } from "./incidents.js";
import { forgetPalette } from "./lattice.js";
import { overview } from "./overview.js";

const VIEWS = { "": overview, engine: engineView, incidents: incidentList, incident: incidentView };
const main = document.getElementById("main");
const connection = document.getElementById("connection");
const latest = new Set();
let showing = new AbortController();
let following = null;

function address() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/").map(decodeURIComponent);
  return { view, parts, query: new URLSearchParams(search) };
}

/** Change what the address remembers of the present view, without a new entry in the history. */
function change(values) {
  const { query } = address();
  for (const [name, value] of Object.entries(values)) {
    if (value === "") query.delete(name);
    else query.set(name, value);
  }
  const search = query.toString();
  history.replaceState(null, "", location.hash.split("?")[0] + (search ? `?${search}` : ""));
}

async function show() {
  showing.abort();
  showing = new AbortController();
  const { signal } = showing;
  const { view, parts, query } = address();
  document.title = "stagewatch";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === (view ? `#/${view}` : "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    if (!token()) throw new Refused(401, "");
    document.getElementById("leave").hidden = false;
    listen();
    await (VIEWS[view] ?? overview)(main, { signal, parts, query, change, latest });
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof Refused)) throw error;
    login(error.status === 403 ? "This token may not read." : token() ? "The collector does not know this token." : "");
  }
}

function listen() {
  if (following) return;
  following = new AbortController();
  follow(following.signal, (told) => {
    if (told.kind === "updated") return;
    latest.add(told.incident.id);
    setTimeout(() => latest.delete(told.incident.id), 5000);
  });
}

function login(why) {
  following?.abort();
  following = null;
  document.getElementById("leave").hidden = true;
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true, "aria-describedby": "token-help" });
  const refused = h("p", { class: "wrong", role: "alert" }, why);
  const enter = async (event) => {
    event.preventDefault();
    const before = token();
    keepToken(field.value.trim());
    try {
      await get("/v1/engines");
      show();
    } catch (error) {
      if (before) keepToken(before);
      else forgetToken();
      refused.textContent = error instanceof Refused
        ? (error.status === 403 ? "This token may not read: it needs the scope read." : error.status === 401 ? "The collector does not know this token." : error.message)
        : "The collector cannot be reached.";
      field.focus();
    }
  };
  main.replaceChildren(h("form", { class: "panel login", onsubmit: enter },
    h("h1", {}, "A token is needed"), h("label", { for: "token" }, "Bearer token with the scope read"), field,
    h("p", { id: "token-help", class: "dim" }, "On the collector's host: the file token in its data directory, or one made by stagewatch token. It is kept in this tab only."),
    h("button", { type: "submit" }, "Look"), refused));
  field.focus();
}

onConnection((well) => {
  connection.textContent = well ? "connected" : "connection lost, trying again";
  connection.classList.toggle("lost", !well);
});

document.getElementById("leave").addEventListener("click", () => {
  forgetToken();
  show();
});

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  themeButton.textContent = `Theme: ${name}`;
  forgetPalette();
}
themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(localStorage.getItem("stagewatch-theme") ?? "auto") + 1) % THEMES.length];
  localStorage.setItem("stagewatch-theme", next);
  theme(next);
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetPalette(); show(); });
theme(localStorage.getItem("stagewatch-theme") ?? "auto");

window.addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true });
});
show();
