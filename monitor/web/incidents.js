// Incidents: the list, and one of them with both sides' values, the chain of cause and the remedy.

import { ago, chip, h, plural, table } from "./dom.js";
import { get, patience } from "./api.js";

/** Where it began and where it has come to. */
export function headline(incident) {
  const first = incident.chain[0]?.text ?? incident.check, last = incident.chain.at(-1)?.text ?? "";
  return first === last || !last ? first : `${first} → ${last}`;
}

export function incidentTable(incidents, latest = null, empty = "None.") {
  if (!incidents.length) return h("p", { class: "dim" }, empty);
  const rows = incidents.map((incident) => ({
    attributes: { class: latest?.has(incident.id) ? "fresh" : "" },
    cells: [
      chip(incident.severity),
      [h("a", { href: `#/incident/${incident.id}` }, incident.request || incident.instance)],
      headline(incident), incident.check, String(incident.first_bad_step), blamed(incident), ago(incident.first_bad_ns),
    ],
  }));
  return table(["Severity", "Request", "What happened", "Check", "#First bad step", "Blamed", "When"], rows, "Incidents");
}

const blamed = (incident) => (incident.blamed.length ? `rank ${incident.blamed.join(", ")}` : "undecided");

export async function incidentList(main, { signal, latest }) {
  const part = h("div");
  const severity = h("select", { id: "severity" }, ["notice", "warning", "critical"].map((word) => h("option", { value: word }, word)));
  const more = h("button", { type: "button", hidden: true }, "Older");
  const older = h("div");
  main.replaceChildren(h("h1", {}, "Incidents"),
    h("div", { class: "tools" }, h("label", {}, "At least", severity)), part, older, more);
  let next = null, shown = "";
  const look = async () => {
    const page = await get(`/v1/incidents?limit=50&severity=${severity.value}`, signal);
    const now = JSON.stringify(page);
    if (now === shown) return;
    shown = now;
    next = page.next;
    more.hidden = next === null;
    older.replaceChildren();
    part.replaceChildren(incidentTable(page.incidents, latest, "No incident. That is the normal state."));
  };
  severity.addEventListener("change", () => { shown = ""; look().catch(() => {}); });
  more.addEventListener("click", async () => {
    const page = await get(`/v1/incidents?limit=50&severity=${severity.value}&before=${next}`, signal).catch(() => null);
    if (!page) return;
    next = page.next;
    more.hidden = next === null;
    older.append(incidentTable(page.incidents));
  });
  while (!signal.aborted) {
    try { await look(); } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, patience(2000)));
  }
}

export async function incidentView(main, { signal, parts }) {
  const part = h("div");
  main.replaceChildren(part);
  let shown = "";
  while (!signal.aborted) {
    try {
      const incident = await get(`/v1/incidents/${encodeURIComponent(parts[0] ?? "")}`, signal);
      const now = JSON.stringify(incident);
      if (now !== shown) {
        shown = now;
        part.replaceChildren(...story(incident));
        document.title = `${incident.severity}: ${incident.request || incident.instance} · stagewatch`;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
      if (error.status) {
        part.replaceChildren(h("h1", {}, "No such incident"), h("p", {}, "It may have been removed by age, or belong to another deployment than your token's. ", h("a", { href: "#/incidents" }, "All incidents")));
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, patience(2000)));
  }
}

function story(incident) {
  const lattice = `#/engine/${encodeURIComponent(incident.instance)}/${incident.dp}?step=${incident.first_bad_step}` +
    (incident.request ? `&request=${encodeURIComponent(incident.request)}&zoom=requests` : "");
  const facts = [
    ["First bad step", [h("a", { href: lattice }, String(incident.first_bad_step))]],
    ["Last good step", incident.last_good_step ? String(incident.last_good_step) : "none on record"],
    ["Newest bad step", String(incident.last_bad_step)],
    ["Ranks that disagree", incident.ranks.join(", ") || "none"],
    ["Blamed", blamed(incident)],
    ["Check", incident.check],
    ["Found", `${plural(incident.latency_steps, "step")} later, ${ago(incident.first_bad_ns)}`],
    ["Engine", [h("a", { href: `#/engine/${encodeURIComponent(incident.instance)}/${incident.dp}` }, incident.instance), ` · ${incident.deployment} · replica ${incident.dp}`]],
  ];
  return [
    h("h1", {}, chip(incident.severity), " ", incident.request || "The whole engine"),
    h("p", {}, headline(incident)),
    h("section", { class: "panel", "aria-label": "First divergence" },
      h("h2", {}, `Step ${incident.first_bad_step}, side by side`), values(incident)),
    h("section", { class: "panel", "aria-label": "Chain of cause" }, h("h2", {}, "Chain of cause"),
      h("ol", { class: "chain" }, incident.chain.map((link) => h("li", {}, h("strong", {}, `step ${link.step}: `), link.text)))),
    h("section", { class: "panel", "aria-label": "Remedy" }, h("h2", {}, "What to do"), h("p", {}, incident.remedy)),
    h("div", { class: "facts" }, table(["Fact", "Value"], facts, "Facts")),
    ...frozen(incident.windows ?? []),
    h("p", { class: "dim" }, "All of it in one file: ", h("code", {}, `stagewatch bundle ${incident.id}`)),
    h("p", { class: "dim" }, "The whole story, from the collector's data directory: ", h("code", {}, `stagewatch replay DATA_DIR show ${incident.id}`)),
  ];
}

/** What sidecars kept of the rings around it, on their own nodes. */
function frozen(windows) {
  if (!windows.length) return [];
  const rows = windows.map(({ rank, host, path, first_step, last_step, failure }) => ({
    cells: [rank, host, failure ? "none" : `${first_step} to ${last_step}`, failure || [h("code", {}, path)]],
  }));
  return [h("section", { class: "panel", "aria-label": "Windows" }, h("h2", {}, "What the rings held then"),
    table(["Rank", "Node", "Steps", "File on the node, or why there is none"], rows, "Frozen windows"))];
}

/** Fields down, ranks across; where ranks hold different values the row is emphasised. */
function values(incident) {
  if (!incident.values.length) return h("p", { class: "dim" }, "This finding compares no values of a request.");
  const ranks = [...new Set(incident.values.map((value) => value.rank))].sort((a, b) => a - b);
  const fields = [...new Set(incident.values.map((value) => value.field))];
  const rows = fields.map((field) => {
    const texts = ranks.map((rank) => incident.values.find((value) => value.rank === rank && value.field === field)?.text ?? "");
    return {
      attributes: { class: new Set(texts).size > 1 ? "unequal" : "" },
      cells: [field, ...texts.map((text, at) => [h("code", { class: incident.blamed.includes(ranks[at]) && "wrong" }, text)])],
    };
  });
  return table(["Field", ...ranks.map((rank) => `Rank ${rank}${incident.blamed.includes(rank) ? " (wrong)" : ""}`)], rows, "Values at the first bad step");
}
