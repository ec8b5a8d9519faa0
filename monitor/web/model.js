// The picture of one engine as this page knows it: steps in order, and what is worth a mark in each.

export const DIFFERS = 1, EXCLUDED = 2, PREFILL = 4, FROZEN = 8;
const STEPS_KEPT = 6000;

export class Model {
  constructor() { this.clear(); }

  clear() {
    this.revision = 0;
    this.version = (this.version ?? 0) + 1;
    this.steps = new Map();
    this.order = [];
    this.uncompared = [];
    this.detailed = false;
  }

  /** Take what changed. Returns whether anything did. */
  take(view, detailed) {
    // A revision that went back is another collector's memory: what was seen before may be told anew.
    if (view.revision < this.revision) this.clear();
    const changed = view.step.length > 0 || view.uncompared.length > 0;
    this.revision = view.revision;
    if (changed) this.version++;
    this.detailed = detailed;
    let start = 0, fresh = false;
    view.step.forEach((step, at) => {
      const rows = view.rows[at];
      const found = { step, t: view.t_ms[at], rows, differing: view.differing[at], marks: new Map(), batch: null };
      if (view.batches) {
        found.batch = [];
        for (let row = 0; row < rows; row++) {
          found.batch.push({
            request: view.requests[view.batches.request[start + row]],
            slot: view.batches.slot[start + row],
            prefill: view.batches.prefill[start + row] === 1,
          });
        }
        start += rows;
      }
      fresh = fresh || !this.steps.has(step);
      this.steps.set(step, found);
    });
    const marks = view.marks;
    marks.step.forEach((step, at) => {
      this.steps.get(step)?.marks.set(marks.row[at], {
        request: view.requests[marks.request[at]], slot: marks.slot[at], state: marks.state[at],
        drift: marks.drift[at], ranks: marks.ranks[at],
      });
    });
    for (const [first, last, reason] of view.uncompared) this.uncompared.push({ first, last, reason });
    if (fresh) this.order = [...this.steps.keys()].sort((a, b) => a - b);
    while (this.order.length > STEPS_KEPT) this.steps.delete(this.order.shift());
    if (this.uncompared.length > STEPS_KEPT) this.uncompared.splice(0, this.uncompared.length - STEPS_KEPT);
    return changed;
  }

  get newest() { return this.order.at(-1) ?? 0; }
  get oldest() { return this.order[0] ?? 0; }

  /** Why a step has no cells; null if it has, or if nothing is known of it. */
  reason(step) {
    return this.uncompared.find(({ first, last }) => first <= step && step <= last)?.reason ?? null;
  }

  /** Excluded rows of a step. */
  excluded(found) {
    let count = 0;
    for (const mark of found.marks.values()) if (mark.state & EXCLUDED) count++;
    return count;
  }

  /**
   * Rows from `first` to `last`: [{key, cells: Map(step → cell)}]. Lanes are requests, in the order in which they
   * appear, or slots, in theirs; a slot's cell that another request begins has `begins`.
   */
  lanes(first, last, wanted, bySlot = false) {
    const lanes = new Map();
    const add = (step, request, cell) => {
      if (wanted && !request.includes(wanted)) return;
      const key = bySlot ? cell.slot : request;
      let lane = lanes.get(key);
      if (!lane) lanes.set(key, lane = { key, request, cells: new Map() });
      lane.cells.set(step, bySlot && lane.request !== request ? { ...cell, begins: true } : cell);
      lane.request = request;
    };
    for (let step = first; step <= last; step++) {
      const found = this.steps.get(step);
      if (!found) continue;
      if (found.batch) {
        found.batch.forEach((row, at) => {
          const mark = found.marks.get(at);
          add(step, row.request, mark ?? { request: row.request, slot: row.slot, state: row.prefill ? PREFILL : 0, drift: 0, ranks: [] });
        });
      } else {
        for (const mark of found.marks.values()) add(step, mark.request, mark);
      }
    }
    const found = [...lanes.values()];
    return bySlot ? found.sort((a, b) => a.key - b.key) : found;
  }
}
