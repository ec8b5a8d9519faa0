// Drawing. One lattice: lanes down (ranks, or requests or slots when zoomed in), steps across, newest at the right.
// Shapes say what colours say: a cross differs, a notch was excluded, a bar is frozen, a slope drifts, hatching is unknown,
// and in a slot's lane a line stands where another request begins.

import { DIFFERS, EXCLUDED, FROZEN, PREFILL } from "./model.js";

const LABEL = 132, AXIS = 22;

export class Lattice {
  constructor(holder, canvas, tall) {
    this.holder = holder;
    this.canvas = canvas;
    this.tall = tall;
    this.cell = 12;
    this.lane = 20;
    this.last = 0;
    this.cursor = { step: 0, lane: 0 };
    this.lanes = [];
  }

  get columns() { return Math.max(1, Math.floor((this.width - this.label) / this.cell)); }
  get first() { return this.last - this.columns + 1; }
  get width() { return this.holder.clientWidth || 300; }
  get label() { return this.width < 500 ? 74 : LABEL; }

  /** lanes: [{name, cell(step) → {kind, state, drift, share} or null}] */
  draw(lanes, last) {
    performance.mark("draw-begins");
    this.lanes = lanes;
    this.last = last;
    const ratio = window.devicePixelRatio || 1;
    const height = Math.min(AXIS + lanes.length * this.lane + 4, Math.max(120, window.innerHeight * 0.66));
    const { canvas, width } = this;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.tall.style.height = `${AXIS + lanes.length * this.lane + 4}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colours = palette();
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, width, height);
    const top = this.holder.scrollTop;
    const from = Math.max(0, Math.floor(top / this.lane));
    const until = Math.min(lanes.length, Math.ceil((top + height - AXIS) / this.lane));
    for (let at = from; at < until; at++) {
      const y = AXIS + at * this.lane - top;
      for (let step = Math.max(1, this.first); step <= last; step++) {
        const cell = lanes[at].cell(step);
        if (cell) paint(pen, colours, cell, this.x(step), y, this.cell - 1, this.lane - 2);
      }
      this.labelLane(pen, colours, lanes[at], at, y);
    }
    this.axis(pen, colours);
    this.mark(pen, colours, top);
    performance.measure("draw", "draw-begins");
  }

  x(step) { return this.label + (step - this.first) * this.cell; }

  labelLane(pen, colours, lane, at, y) {
    pen.fillStyle = colours.panel;
    pen.fillRect(0, y, this.label - 4, this.lane);
    if (this.lane < 9 && at % Math.ceil(9 / this.lane)) return;
    pen.fillStyle = colours.text;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillText(fit(pen, lane.name, this.label - 12), 6, y + this.lane / 2);
  }

  axis(pen, colours) {
    pen.fillStyle = colours.panel;
    pen.fillRect(0, 0, this.width, AXIS);
    pen.fillStyle = colours.dim;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * this.cell >= 56) ?? 1000;
    for (let step = Math.ceil(Math.max(1, this.first) / every) * every; step <= this.last; step += every) {
      pen.fillRect(this.x(step), AXIS - 4, 1, 4);
      pen.fillText(String(step), this.x(step) + 3, AXIS / 2);
    }
  }

  mark(pen, colours, top) {
    const { step, lane } = this.cursor;
    if (step < this.first || step > this.last || !this.lanes.length) return;
    pen.strokeStyle = colours.focus;
    pen.lineWidth = 2;
    pen.strokeRect(this.x(step) - 1, AXIS, this.cell + 1, Math.max(4, this.lanes.length * this.lane - top));
    if (document.activeElement === this.canvas) {
      pen.strokeRect(this.x(step) - 2, AXIS + lane * this.lane - top - 1, this.cell + 3, this.lane + 1);
    }
  }

  /** {step, lane} under a point of the canvas; null outside. */
  hit(x, y) {
    const step = this.first + Math.floor((x - this.label) / this.cell);
    const lane = Math.floor((y - AXIS + this.holder.scrollTop) / this.lane);
    return x < this.label || y < AXIS || step < 1 || step > this.last || lane >= this.lanes.length ? null : { step, lane };
  }

  /** Scroll so that a lane can be seen. */
  reveal(lane) {
    const y = lane * this.lane;
    const room = this.canvas.clientHeight - AXIS - this.lane;
    if (y < this.holder.scrollTop) this.holder.scrollTop = y;
    else if (y > this.holder.scrollTop + room) this.holder.scrollTop = y - room;
  }
}

export function paint(pen, colours, cell, x, y, width, height) {
  if (cell.kind === "unknown") {
    pen.fillStyle = colours.none;
    for (let line = 0; line < height; line += 4) pen.fillRect(x, y + line, width, 1.5);
    return;
  }
  const differs = cell.state & DIFFERS;
  pen.fillStyle = cell.state & PREFILL ? colours.prefill : colours.consistent;
  pen.fillRect(x, y, width, height);
  if (differs) {
    pen.fillStyle = colours.differs;
    const share = Math.max(0.35, cell.share ?? 1);
    pen.fillRect(x, y + height * (1 - share), width, height * share);
    pen.strokeStyle = colours.panel;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (cell.state & FROZEN) {
      pen.moveTo(x, y + height / 2);
      pen.lineTo(x + width, y + height / 2);
    } else if (cell.drift) {
      pen.moveTo(x, y + height * (cell.drift < 0 ? 0.2 : 0.85));
      pen.lineTo(x + width, y + height * (cell.drift < 0 ? 0.85 : 0.2));
    } else {
      pen.moveTo(x + 1.5, y + height - 1.5);
      pen.lineTo(x + width - 1.5, y + height * (1 - share) + 1.5);
      pen.moveTo(x + 1.5, y + height * (1 - share) + 1.5);
      pen.lineTo(x + width - 1.5, y + height - 1.5);
    }
    pen.stroke();
  }
  if (cell.begins) {
    pen.fillStyle = colours.text;
    pen.fillRect(x - 1, y - 1, 2, height + 2);
  }
  if (cell.state & EXCLUDED) {
    pen.fillStyle = colours.excluded;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + width, y);
    pen.lineTo(x + width / 2, y + Math.min(height * 0.55, 8));
    pen.fill();
  }
}

let known = null;

/** The page's colours, as the theme has them. */
export function palette() {
  if (known) return known;
  const style = getComputedStyle(document.documentElement);
  known = Object.fromEntries(["panel", "text", "dim", "focus", "consistent", "differs", "excluded", "none", "prefill"]
    .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return known;
}

export function forgetPalette() { known = null; }

function fit(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return `${text.slice(0, end)}…`;
}
