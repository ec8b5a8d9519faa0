// All engines at a glance.

import { ago, chip, h, number, table } from "./dom.js";
import { get, patience } from "./api.js";
import { incidentTable } from "./incidents.js";

export function verdicts(state) {
  const { CONSISTENT: consistent = 0, DIVERGED: diverged = 0, ...unknown } = state.verdicts;
  return { consistent, diverged, unknown: Object.values(unknown).reduce((sum, rows) => sum + rows, 0), reasons: unknown };
}

/** The one word for an engine, and its kind for colour. */
export function standing(state) {
  if (state.wedged) return ["stuck", "stuck"];
  if (state.worst) return [state.worst, state.worst];
  if (state.ended) return ["ended", "ended"];
  if (state.missing.length || state.ranks.some((rank) => !rank.armed)) return ["incomplete", "incomplete"];
  return ["consistent", "ok"];
}

export const engineHref = (state, more = "") => `#/engine/${encodeURIComponent(state.instance)}/${state.dp}${more}`;

export async function overview(main, { signal, latest }) {
  const list = h("div"), recent = h("div");
  main.replaceChildren(h("h1", {}, "Engines"), list, h("h2", {}, "Newest incidents"), recent);
  let shown = "";
  while (!signal.aborted) {
    try {
      const { engines } = await get("/v1/engines", signal);
      const { incidents } = await get("/v1/incidents?limit=20", signal);
      const now = JSON.stringify([engines, incidents]);
      if (now !== shown) {
        shown = now;
        keepingFocus(list, () => list.replaceChildren(engines.length ? engineTable(engines) : empty()));
        keepingFocus(recent, () => recent.replaceChildren(incidentTable(incidents, latest)));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, patience(1000)));
  }
}

/** Rebuild a part of the page; whoever had its link of the same target in focus has it again. */
export function keepingFocus(part, build) {
  const at = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  build();
  if (at) [...part.querySelectorAll("a")].find((link) => link.getAttribute("href") === at)?.focus();
}

function engineTable(engines) {
  const rows = [...engines].reverse().map((state) => {
    const { consistent, diverged, unknown } = verdicts(state);
    const [word, kind] = standing(state);
    const armed = state.ranks.filter((rank) => rank.armed).length;
    return [
      chip(kind, word),
      [h("a", { href: engineHref(state) }, state.instance), state.dp ? ` replica ${state.dp}` : ""],
      state.deployment,
      `${armed} of ${state.ranks.length + state.missing.length}`,
      number(state.compared_to), number(consistent), number(diverged), number(unknown), ago(state.heard_ns),
    ];
  });
  return table(["State", "Engine", "Deployment", "#Ranks armed", "#Compared to step", "#Consistent rows", "#Diverged", "#Undecided", "Heard"], rows, "Engines");
}

function empty() {
  const secure = location.protocol === "https:" ? "wss" : "ws";
  return h("section", { class: "panel" },
    h("p", {}, "No engine has reported yet. To connect one:"),
    h("ol", {},
      h("li", {}, "In the engine's environment, before it starts: ", h("pre", {}, "pip install stagewatch\nexport STAGEWATCH_RING_DIR=/dev/shm/stagewatch")),
      h("li", {}, "Beside it, on the same node and as the same user, with a token that may ingest: ",
        h("pre", {}, `stagewatch-agent ship --ring-dir /dev/shm/stagewatch --collector ${secure}://${location.host} --token-file TOKEN_FILE`)),
      h("li", {}, "If nothing appears: ", h("code", {}, "stagewatch-agent doctor"), " says what the engine would record, and why not.")),
    h("p", { class: "dim" }, "This page looks again every second."));
}
