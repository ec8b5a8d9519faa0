// What the collector says. The token stays in this tab's session storage and goes nowhere but into a header.

const KEY = "stagewatch-token";
let lost = 0;
const listeners = new Set();

export const token = () => sessionStorage.getItem(KEY) ?? "";
export const keepToken = (value) => sessionStorage.setItem(KEY, value);
export const forgetToken = () => sessionStorage.removeItem(KEY);

/** Calls back with true when the collector answers again, false when it no longer does. */
export function onConnection(callback) { listeners.add(callback); }

function connected(well) {
  lost = well ? 0 : lost + 1;
  for (const callback of listeners) callback(well);
}

export class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

export async function get(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { headers: { Authorization: `Bearer ${token()}` }, signal, cache: "no-store" });
  } catch (error) {
    if (error.name !== "AbortError") connected(false);
    throw error;
  }
  if (answer.status === 502 || answer.status === 504) connected(false);
  else connected(true);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, typeof body.detail === "string" ? body.detail : answer.statusText);
  return body;
}

/** How long to wait before the next try: longer with every one that failed, at most 5 s. */
export const patience = (base) => Math.min(5000, base * 2 ** Math.min(lost, 6));

/** Incidents as they come, for ever: reconnects, and resumes after the last one seen. */
export async function follow(signal, take) {
  let last = null;
  while (!signal.aborted) {
    try {
      const headers = { Authorization: `Bearer ${token()}` };
      if (last !== null) headers["Last-Event-ID"] = last;
      const answer = await fetch("/v1/events", { headers, signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) throw new Refused(answer.status, "");
      if (!answer.ok) throw new Error(answer.statusText);
      connected(true);
      let text = "";
      for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
        text += piece;
        for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
          const fields = Object.fromEntries(text.slice(0, end).split("\n").map((line) => {
            const colon = line.indexOf(":");
            return [line.slice(0, colon), line.slice(colon + 1).trim()];
          }));
          text = text.slice(end + 2);
          if (fields.id) last = fields.id;
          if (fields.data) take(JSON.parse(fields.data));
        }
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refused) return;
    }
    if (signal.aborted) return;
    connected(false);
    await new Promise((resolve) => setTimeout(resolve, patience(500)));
  }
}

async function* pieces(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}
