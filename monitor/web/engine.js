// One engine as a lattice: live, or at a step that the address names.

import { chip, h, number, plural, table } from "./dom.js";
import { get, patience } from "./api.js";
import { Lattice, paint, palette } from "./lattice.js";
import { DIFFERS, EXCLUDED, FROZEN, Model, PREFILL } from "./model.js";
import { standing, verdicts } from "./overview.js";
import { incidentTable } from "./incidents.js";

const LOOK_MS = 250;
/** What a lane is, and how it is called. */
const ZOOMS = { ranks: "by rank", requests: "by request", slots: "by slot" };

export async function engineView(main, { signal, parts, query, change, latest }) {
  const view = new EngineView(main, parts[0] ?? "", Number(parts[1] ?? 0), query, change, latest, signal);
  await view.run();
}

class EngineView {
  constructor(main, instance, dp, query, change, latest, signal) {
    Object.assign(this, { instance, dp, change, latest, signal });
    this.model = new Model();
    this.step = Number(query.get("step")) || 0;
    this.zoom = query.get("zoom") in ZOOMS ? query.get("zoom") : "ranks";
    this.request = query.get("request") ?? "";
    this.rank = query.get("rank") ?? "";
    this.state = null;
    this.incidents = [];
    this.build(main);
  }

  build(main) {
    this.head = h("div");
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "lattice", "aria-label": "Lattice: steps across. Arrow keys move, plus and minus zoom, L goes live, N and P go to the next and previous incident." });
    const tall = h("div", { class: "tall" });
    this.holder = h("div", { class: "lattice" }, tall, this.canvas);
    this.lattice = new Lattice(this.holder, this.canvas, tall);
    this.said = h("p", { role: "status", "aria-live": "polite", class: "dim" });
    this.detail = h("div");
    this.list = h("div");
    this.note = h("p", { class: "dim" });
    main.replaceChildren(this.head, this.tools(), this.note, this.holder, this.legend(), this.said, this.detail, h("h2", {}, "Incidents of this engine"), this.list);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("focus", () => this.draw());
    this.canvas.addEventListener("blur", () => this.draw());
    this.holder.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.holder);
    this.signal.addEventListener("abort", () => cancelAnimationFrame(this.frame));
  }

  tools() {
    const button = (text, title, act) => h("button", { type: "button", title, onclick: act }, text);
    this.live = button("Live", "Follow the newest step (L)", () => this.goto(0));
    this.lens = h("select", { "aria-label": "Lanes", title: "What a lane is (Z)", onchange: () => this.zoomTo(this.lens.value) },
      Object.entries(ZOOMS).map(([zoom, text]) => h("option", { value: zoom }, text)));
    this.seek = h("input", { type: "range", min: 1, max: 1, value: 1, "aria-label": "Step", oninput: () => this.goto(Number(this.seek.value)) });
    this.find = h("input", { type: "search", size: 14, value: this.request, "aria-label": "Request", placeholder: "request id", oninput: () => this.filter({ request: this.find.value.trim() }) });
    this.pick = h("select", { "aria-label": "Rank", onchange: () => this.filter({ rank: this.pick.value }) }, h("option", { value: "" }, "all ranks"));
    return h("div", { class: "tools", role: "toolbar", "aria-label": "Replay" },
      this.live, button("−1", "One step back (←)", () => this.move(-1)), button("+1", "One step on (→)", () => this.move(1)), this.seek,
      button("◀ incident", "Previous incident (P)", () => this.jump(-1)), button("incident ▶", "Next incident (N)", () => this.jump(1)),
      this.lens, this.pick, this.find);
  }

  legend() {
    const sample = (state, text, more = {}) => {
      const canvas = h("canvas", { width: 26, height: 28, "aria-hidden": "true" });
      canvas.style.width = "13px";
      canvas.style.height = "14px";
      const pen = canvas.getContext("2d");
      pen.scale(2, 2);
      paint(pen, palette(), { state, ...more }, 0, 0, 13, 14);
      return h("li", {}, canvas, text);
    };
    return h("ul", { class: "legend", "aria-label": "Legend" },
      sample(0, "agrees with the last stage"), sample(PREFILL, "prefill"), sample(DIFFERS, "differs"),
      sample(DIFFERS | FROZEN, "frozen on an old token"), sample(DIFFERS, "drifts in position", { drift: 1 }),
      sample(EXCLUDED, "dropped from the broadcast"), sample(0, "not comparable", { kind: "unknown" }));
  }

  async run() {
    let looks = 0;
    while (!this.signal.aborted) {
      try {
        if (looks % 4 === 0) await this.lookAround();
        const detailed = this.zoom !== "ranks";
        if (detailed && !this.model.detailed) this.model.clear();
        const path = `/v1/engines/${encodeURIComponent(this.instance)}/picture?dp=${this.dp}&after=${this.model.revision}&batches=${detailed}`;
        if (this.model.take(await get(path, this.signal), detailed)) this.draw();
        looks++;
      } catch (error) {
        if (this.signal.aborted) return;
        if (error.status === 401 || error.status === 403) throw error;
        if (error.status === 404) {
          this.head.replaceChildren(h("h1", {}, "No such engine"), h("p", {}, "It has not reported since the collector started, or your token is for another deployment. ", h("a", { href: "#/" }, "All engines")));
        }
      }
      await new Promise((resolve) => setTimeout(resolve, patience(document.hidden ? 2000 : LOOK_MS)));
    }
  }

  async lookAround() {
    const { engines } = await get(`/v1/engines/${encodeURIComponent(this.instance)}`, this.signal);
    const state = engines.find((each) => each.dp === this.dp);
    if (!state) throw Object.assign(new Error("no such replica"), { status: 404 });
    const { incidents } = await get(`/v1/incidents?instance=${encodeURIComponent(this.instance)}&limit=200`, this.signal);
    const first = this.state === null;
    this.state = state;
    const mine = incidents.filter((incident) => incident.dp === this.dp);
    if (JSON.stringify(mine) !== JSON.stringify(this.incidents) || first) {
      this.incidents = mine;
      this.list.replaceChildren(incidentTable(mine, this.latest, "None."));
    }
    this.header(engines.length);
    if (first) {
      for (const [index, name] of this.names().entries()) this.pick.append(h("option", { value: String(index) }, name));
      this.pick.value = this.rank;
      this.draw();
    }
  }

  header(replicas) {
    const { state } = this;
    const [word, kind] = standing(state);
    const { consistent, diverged, unknown, reasons } = verdicts(state);
    const why = Object.entries(reasons).map(([reason, rows]) => `${reason} ${number(rows)}`).join(", ");
    const others = Array.from({ length: replicas }, (_, dp) => dp === this.dp ? null
      : h("a", { href: `#/engine/${encodeURIComponent(this.instance)}/${dp}` }, ` replica ${dp}`));
    const text = JSON.stringify([word, consistent, diverged, why, state.wedged, state.compared_to]);
    if (text === this.headed) return;
    this.headed = text;
    this.head.replaceChildren(
      h("h1", {}, chip(kind, word), " ", state.instance, replicas > 1 ? ` · replica ${this.dp}` : "", ...others),
      h("p", {}, `${state.deployment} · compared to step ${number(state.compared_to)} · ${plural(consistent, "row")} consistent, ${number(diverged)} diverged, ${number(unknown)} undecided${why ? ` (${why})` : ""}`),
      ...(state.wedged ? [h("p", { class: "wrong" }, state.wedged)] : []),
      ...state.missing.map((rank) => h("p", { class: "dim" }, `Never heard of stage ${rank.pp}, TP rank ${rank.tp}.`)),
      ...state.ranks.filter((rank) => !rank.armed).map((rank) => h("p", { class: "dim" }, `Stage ${rank.identity.rank.pp}, TP rank ${rank.identity.rank.tp} is not armed: ${rank.reason}`)));
    document.title = `${word}: ${state.instance} · stagewatch`;
  }

  /** Ranks of the group, first stage first. */
  ranks() {
    if (!this.state) return [];
    return [...this.state.ranks.map((rank) => rank.identity.rank), ...this.state.missing].sort((a, b) => a.pp - b.pp || a.tp - b.tp);
  }

  names() {
    const ranks = this.ranks();
    const wide = ranks.some((rank) => rank.tp > 0);
    return ranks.map((rank) => wide ? `stage ${rank.pp} · tp ${rank.tp}` : `stage ${rank.pp}`);
  }

  lanes() {
    const { model } = this;
    const reasons = new Map();
    const unknown = (step) => {
      if (!reasons.has(step)) reasons.set(step, model.reason(step));
      return reasons.get(step) ? { kind: "unknown", state: 0 } : null;
    };
    if (this.zoom !== "ranks") {
      this.lattice.lane = 14;
      const key = [this.zoom, model.version, this.lattice.first, this.lattice.last, this.request, this.rank].join(" ");
      if (key !== this.laned) {
        this.laned = key;
        this.byRow = this.rowLanes();
      }
      return this.byRow;
    }
    const ranks = this.ranks();
    this.lattice.lane = ranks.length > 24 ? 12 : 22;
    const early = Math.max(...ranks.map((rank) => rank.pp));
    return this.names().map((name, index) => ({ name, index, early: ranks[index].pp < early }))
      .filter(({ index }) => this.rank === "" || index === Number(this.rank))
      .map(({ name, index, early }) => ({ name, cell: (step) => this.rankCell(step, index, early) ?? unknown(step) }));
  }

  /** Lanes of batch rows: a request's, or those that ran in a slot of the last stage. */
  rowLanes() {
    const wanted = this.rank === "" ? null : Number(this.rank);
    const first = Math.max(1, this.lattice.first);
    const bySlot = this.zoom === "slots";
    return this.model.lanes(first, this.lattice.last, this.request, bySlot).map((lane) => ({
      name: bySlot ? `slot ${lane.key}` : lane.key,
      request: (step) => lane.cells.get(step)?.request,
      cell: (step) => {
        const cell = lane.cells.get(step);
        if (!cell) return null;
        const elsewhere = wanted !== null && cell.state & DIFFERS && !cell.ranks.includes(wanted);
        return elsewhere ? { ...cell, state: cell.state & PREFILL } : cell;
      },
    }));
  }

  rankCell(step, index, early) {
    const found = this.model.steps.get(step);
    if (!found) return null;
    const rows = found.differing[index] ?? 0;
    const cell = { state: rows ? DIFFERS : 0, drift: 0, share: rows / Math.max(1, found.rows) };
    for (const mark of found.marks.values()) {
      if (this.request && !mark.request.includes(this.request)) continue;
      if (early && mark.state & EXCLUDED) cell.state |= EXCLUDED;
      if (rows && mark.ranks.includes(index)) {
        cell.state |= mark.state & FROZEN;
        if (Math.abs(mark.drift) > Math.abs(cell.drift)) cell.drift = mark.drift;
      }
    }
    return cell;
  }

  draw() {
    if (this.frame || this.signal.aborted) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  paint() {
    const { model, lattice } = this;
    const live = this.step === 0;
    const at = live ? model.newest : this.step;
    lattice.cursor.step = at;
    const ahead = Math.floor(lattice.columns / 3);
    lattice.last = live ? Math.max(model.newest, lattice.columns) : Math.max(Math.min(model.newest, at + ahead), at, Math.min(model.newest, lattice.columns));
    const lanes = this.lanes();
    lattice.cursor.lane = Math.min(lattice.cursor.lane, Math.max(0, lanes.length - 1));
    lattice.draw(lanes, lattice.last);
    this.live.setAttribute("aria-pressed", String(live));
    this.lens.value = this.zoom;
    Object.assign(this.seek, { min: model.oldest || 1, max: model.newest || 1, value: at });
    const gone = !live && model.order.length && !model.steps.has(at);
    this.note.textContent = gone
      ? `Step ${at} ${model.reason(at) ? "could not be compared" : "is no longer in the collector's memory"}: stagewatch replay DATA_DIR step ${at} tells it from the journal.`
      : model.order.length ? "" : "Nothing compared yet: waiting for every stage's records.";
    this.tell(at);
  }

  tell(step) {
    const found = this.model.steps.get(step);
    const reason = this.model.reason(step);
    if (!found) {
      this.detail.replaceChildren();
      this.said.textContent = reason ? `Step ${step}: not comparable (${reason}).` : "";
      return;
    }
    const marks = [...found.marks.entries()].filter(([, mark]) => !this.request || mark.request.includes(this.request));
    const key = JSON.stringify([step, this.request, marks.length, marks.map(([, mark]) => mark.state)]);
    if (key === this.told) return;
    this.told = key;
    const differing = marks.filter(([, mark]) => mark.state & DIFFERS).length;
    const excluded = marks.filter(([, mark]) => mark.state & EXCLUDED).length;
    const text = `Step ${step}: ${plural(found.rows, "row")}, ${differing ? `${number(differing)} differing` : "all ranks agree"}${excluded ? `, ${number(excluded)} dropped from the broadcast` : ""}.`;
    // A live page would never stop talking: only what is wrong, or what was asked for, is announced.
    if (this.step || differing || excluded) this.said.textContent = text;
    else this.said.textContent = "";
    const names = this.names();
    this.detail.replaceChildren(marks.length
      ? table(["Request", "#Row", "#Slot", "What", "Ranks that differ"], marks.map(([row, mark]) => [
        [h("a", { href: `#/engine/${encodeURIComponent(this.instance)}/${this.dp}?step=${step}&request=${encodeURIComponent(mark.request)}&zoom=requests` }, mark.request)],
        String(row), String(mark.slot), words(mark), mark.ranks.map((rank) => names[rank] ?? rank).join(", ") || "none"]), `Rows of step ${step}`)
      : h("p", { class: "dim" }, this.step ? "Nothing to remark on in this step." : ""));
  }

  goto(step) {
    this.step = step === 0 ? 0 : Math.max(this.model.oldest || 1, Math.min(step, this.model.newest || step));
    this.remember();
    this.draw();
  }

  move(by) { this.goto((this.step || this.model.newest) + by); }

  jump(way) {
    const from = this.step || this.model.newest + 1;
    const steps = [...new Set(this.incidents.map((incident) => incident.first_bad_step))].sort((a, b) => a - b);
    const next = way > 0 ? steps.find((step) => step > from) : steps.findLast((step) => step < from);
    if (next === undefined) this.said.textContent = `No ${way > 0 ? "later" : "earlier"} incident.`;
    else {
      this.step = next;
      this.remember();
      this.draw();
    }
  }

  zoomTo(zoom) {
    this.zoom = zoom;
    this.holder.scrollTop = 0;
    this.remember();
    this.draw();
  }

  filter(wanted) {
    Object.assign(this, wanted);
    this.told = "";
    this.remember();
    this.draw();
  }

  remember() {
    this.change({ step: this.step || "", zoom: this.zoom === "ranks" ? "" : this.zoom, request: this.request, rank: this.rank });
  }

  click(event) {
    const box = this.canvas.getBoundingClientRect();
    const hit = this.lattice.hit(event.clientX - box.left, event.clientY - box.top);
    if (!hit) return;
    this.lattice.cursor.lane = hit.lane;
    this.goto(hit.step);
  }

  key(event) {
    const { lattice } = this;
    const goLane = (by) => {
      lattice.cursor.lane = Math.max(0, Math.min(lattice.lanes.length - 1, lattice.cursor.lane + by));
      lattice.reveal(lattice.cursor.lane);
      const lane = lattice.lanes[lattice.cursor.lane];
      const request = this.zoom === "slots" && lane?.request(lattice.cursor.step);
      if (lane) this.said.textContent = request ? `${lane.name}: ${request}` : lane.name;
      this.draw();
    };
    const size = (by) => {
      lattice.cell = Math.max(3, Math.min(40, lattice.cell + by));
      this.draw();
    };
    const acts = {
      ArrowLeft: () => this.move(event.shiftKey ? -10 : -1), ArrowRight: () => this.move(event.shiftKey ? 10 : 1),
      ArrowUp: () => goLane(-1), ArrowDown: () => goLane(1), Home: () => this.goto(this.model.oldest), End: () => this.goto(0),
      "+": () => size(2), "=": () => size(2), "-": () => size(-2),
      l: () => this.goto(0), n: () => this.jump(1), p: () => this.jump(-1), z: () => this.zoomTo(Object.keys(ZOOMS)[(Object.keys(ZOOMS).indexOf(this.zoom) + 1) % 3]),
      Enter: () => this.open(),
    };
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  /** Open the incident of the step under the cursor, if there is one. */
  open() {
    const step = this.step || this.model.newest;
    const found = this.incidents.find((incident) => incident.first_bad_step === step && (!this.request || incident.request.includes(this.request)));
    if (found) location.hash = `#/incident/${found.id}`;
    else this.said.textContent = `No incident begins at step ${step}.`;
  }
}

function words(mark) {
  const said = [];
  if (mark.state & EXCLUDED) said.push("dropped from the broadcast");
  if (mark.state & DIFFERS) said.push(mark.drift ? `differs, positions ${mark.drift > 0 ? "+" : "−"}${Math.abs(mark.drift)}` : "differs");
  if (mark.state & FROZEN) said.push("frozen on an old token");
  return said.join("; ");
}

