// The plan: how the memory is shared, and every decision with its reason.

import { byId, make as element } from "../dom.js";

const PARTS = { weights: "used", cache: "cached", activations: "eager", graphs: "else", encoder_cache: "cached", encoder_graphs: "else" };

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${+(count / 1024 ** power).toPrecision(3)} ${units[power]}`;
}

const make = (name, className, ...children) => element(name, { className }, ...children);

/** Shows shares of 1 as a bar; a share that is not 0 can be seen. */
export function fill(track, parts) {
  track.replaceChildren(
    ...parts.map(([name, share]) => {
      const part = make("i", name);
      part.style.width = share > 0 ? `max(2px, ${100 * share}%)` : 0;
      return part;
    }),
  );
}

const value = (it) => (it === null ? "nothing" : typeof it === "object" ? JSON.stringify(it) : String(it));
const range = ({ from, to }) => (from === to ? `${from}` : `${from} to ${to}`);

/** Which batches find a graph, in words: neighbours with the same mode are one range. */
function coverage(ranges, what) {
  const merged = [];
  for (const each of ranges) {
    const last = merged.at(-1);
    if (last?.mode === each.mode) last.to = each.to;
    else merged.push({ ...each });
  }
  const how = { full: "as one full graph", piecewise: "as piecewise graphs", eager: "eagerly, without a graph" };
  return merged.map((each) => `${range(each)} ${what} ${how[each.mode]}`).join("; ");
}

/** What would give those batches a graph that have none; null if all have one. */
function remedy(uncovered, kind) {
  const found = uncovered.filter((each) => each.kind === kind && each.changes.length);
  const change = ({ changes }) => changes.map(({ setting, value }) => `${setting} ${value}`).join(" and ");
  const parts = found.map((each) => `${range(each.batches)} would have graphs with ${change(each)}, ${bytes(each.memory)} more`);
  return parts.length ? parts.join("; ") : null;
}

/** [topic, what it is, what was asked or null, reason or null] of all that the plan decided. */
function decisions({ capture, kernels, speculative, decisions }) {
  const found = decisions.map(({ topic, requested, effective, reason }) => [
    topic,
    value(effective),
    value(requested) === value(effective) ? null : value(requested),
    reason,
  ]);
  if (capture) {
    const plain = capture.coverage.decode.filter((each) => each.tokens_per_row === 1);
    if (plain.length) found.push(["steps that only decode", coverage(plain, "rows"), null, remedy(capture.uncovered, "decode")]);
    const mixed = capture.coverage.mixed;
    if (mixed.length) found.push(["steps with parts of prompts", coverage(mixed, "tokens"), null, remedy(capture.uncovered, "mixed")]);
  }
  if (speculative) {
    found.push(["speculation", `${speculative.method}, ${speculative.num_speculative_tokens} drafts`, null, speculative.reason]);
  }
  const alike = new Map();
  for (const [name, { implementation, reason }] of Object.entries(kernels)) {
    const key = JSON.stringify([implementation, reason]);
    alike.set(key, [...(alike.get(key) ?? []), name]);
  }
  for (const [key, names] of alike) {
    const [implementation, reason] = JSON.parse(key);
    found.push([`kernels: ${names.join(", ")}`, implementation, null, reason]);
  }
  return found;
}

export function showPlan(plan) {
  const { memory } = plan;
  const parts = Object.entries(PARTS).filter(([part]) => memory[part] || !part.startsWith("encoder"));
  fill(byId("memory"), parts.map(([part, name]) => [name, memory[part] / memory.available]));
  byId("memory-parts").replaceChildren(
    ...parts.map(([part, name]) => make("span", "key", make("i", name), `${part.replaceAll("_", " ")} `, make("b", "", bytes(memory[part])))),
    make("span", "", "of ", make("b", "", bytes(memory.available))),
  );
  byId("decisions").replaceChildren(
    ...decisions(plan).map(([topic, effective, requested, reason]) => {
      const asked = requested === null ? [] : [make("small", "", ` (asked: ${requested})`)];
      const why = reason === null ? [] : [make("dd", "why", reason)];
      return make("div", "", make("dt", "", topic.replaceAll("_", " ")), make("dd", "", effective, ...asked), ...why);
    }),
  );
  byId("plan-json").textContent = JSON.stringify(plan, null, 2);
}
